/* [Mohammadalizadehbakhtevari 2021, listing 4.1] as a plain MPI program: build it with any
   mpicc and run it with and without libnostall_mpi.so.
     mpicc -O2 benchmarks/native/mpi_allreduce.c -o mpi_allreduce
     mpirun -n 2 ./mpi_allreduce [largest bytes]
     nostall run -- mpirun -n 2 ./mpi_allreduce
   Prints bytes and the median over calls of the mean over ranks, in microseconds. With a second
   argument N: the time of N calls of 8 bytes, in milliseconds, for the overhead of profiles. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double median_of_calls(float* data, long count, int calls, int rank, int ranks) {
  double* times = malloc(sizeof(double) * (size_t)calls);
  for (int i = 0; i < calls; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    MPI_Allreduce(MPI_IN_PLACE, data, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    times[i] = MPI_Wtime() - begin;
  }
  MPI_Reduce(rank == 0 ? MPI_IN_PLACE : times, times, calls, MPI_DOUBLE, MPI_SUM, 0,
             MPI_COMM_WORLD);
  qsort(times, (size_t)calls, sizeof(double), by_value);
  const double median = times[calls / 2] / ranks;
  free(times);
  return median;
}

int main(int argc, char** argv) {
  int rank, ranks;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc > 2) {
    const long calls = atol(argv[2]);
    double value = 0;
    for (int i = 0; i < 1000; ++i) {
      MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    }
    const double begin = MPI_Wtime();
    for (long i = 0; i < calls; ++i) {
      MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    }
    if (rank == 0) printf("%.3f\n", (MPI_Wtime() - begin) * 1e3);
    MPI_Finalize();
    return 0;
  }
  const long largest = argc > 1 ? atol(argv[1]) : 64L << 20;
  for (long bytes = 8; bytes <= largest; bytes *= 8) {
    float* data = malloc((size_t)bytes);
    memset(data, 0, (size_t)bytes);
    median_of_calls(data, bytes / 4, 5, rank, ranks);
    const long fit = 200000000L / (bytes + 40000);
    const int calls = (int)(fit < 11 ? 11 : fit > 4000 ? 4000 : fit);
    const double median = median_of_calls(data, bytes / 4, calls, rank, ranks);
    if (rank == 0) printf("%10ld %12.2f\n", bytes, median * 1e6);
    free(data);
  }
  MPI_Finalize();
  return 0;
}
