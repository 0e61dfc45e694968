! A Fortran program for Open MPI that calls what libnostall_mpi.so answers, and nothing else of the
! MPI. Its constants are those of Open MPI's mpif.h, which a wheel of Open MPI does not have; with one,
! `include 'mpif.h'` stands in their place and the program is the same.
program mpi_fortran
  implicit none
  integer, parameter :: MPI_COMM_WORLD = 0, MPI_SUM = 3, MPI_MAX = 1, MPI_INFO_NULL = 0
  integer, parameter :: MPI_INTEGER = 7, MPI_DOUBLE_PRECISION = 17, MPI_COMPLEX = 18
  integer, parameter :: MPI_THREAD_MULTIPLE = 3, MPI_STATUS_SIZE = 6, MPI_SUCCESS = 0
  integer, parameter :: MPI_REQUEST_NULL = 0, MPI_UNDEFINED = -32766
  integer :: MPI_IN_PLACE, MPI_STATUS_IGNORE(MPI_STATUS_SIZE)
  double precision :: MPI_STATUSES_IGNORE(MPI_STATUS_SIZE, 1)
  common /mpi_fortran_in_place/ MPI_IN_PLACE
  common /mpi_fortran_status_ignore/ MPI_STATUS_IGNORE
  common /mpi_fortran_statuses_ignore/ MPI_STATUSES_IGNORE

  integer, parameter :: n = 20000
  integer :: rank, ranks, error, turn, level
  integer :: whole(7), request(2), status(MPI_STATUS_SIZE), statuses(MPI_STATUS_SIZE, 2)
  double precision :: sums(n), mine(n)
  complex :: pairs(5)
  integer :: every(21), counts(3), places(3)
  integer :: waited(2), some, which, indices(2)
  logical :: done
  character(len=16) :: text

  call get_environment_variable('OMPI_COMM_WORLD_RANK', text)
  read (text, *) rank
  call get_environment_variable('OMPI_COMM_WORLD_SIZE', text)
  read (text, *) ranks
  call mpi_init_thread(MPI_THREAD_MULTIPLE, level, error)
  if (error /= MPI_SUCCESS .or. level /= MPI_THREAD_MULTIPLE) stop 10
  call mpi_barrier(MPI_COMM_WORLD, error)
  do turn = 1, 10
    mine = rank + turn
    call mpi_allreduce(mine, sums, n, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD, error)
    if (error /= MPI_SUCCESS) stop 11
    if (any(sums /= ranks*turn + ranks*(ranks - 1)/2)) stop 1
    call mpi_allreduce(MPI_IN_PLACE, mine, n, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD, error)
    if (any(mine /= sums)) stop 2
    whole = rank
    if (rank == 1) then
      call mpi_reduce(MPI_IN_PLACE, whole, 7, MPI_INTEGER, MPI_MAX, 1, MPI_COMM_WORLD, error)
      if (any(whole /= ranks - 1)) stop 3
    else
      call mpi_reduce(whole, whole, 7, MPI_INTEGER, MPI_MAX, 1, MPI_COMM_WORLD, error)
    end if
    pairs = cmplx(rank, turn)
    call mpi_bcast(pairs, 5, MPI_COMPLEX, 1, MPI_COMM_WORLD, error)
    if (any(pairs /= cmplx(1, turn))) stop 4
    mine = rank + turn
    call mpi_iallreduce(MPI_IN_PLACE, mine, n, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD, &
                        request(1), error)
    call mpi_ibarrier(MPI_COMM_WORLD, request(2), error)
    call mpi_wait(request(1), MPI_STATUS_IGNORE, error)
    if (any(mine /= sums)) stop 5
    call mpi_iallreduce(MPI_IN_PLACE, sums, n, MPI_DOUBLE_PRECISION, MPI_SUM, MPI_COMM_WORLD, &
                        request(1), error)
    if (mod(turn, 2) == 0) then
      call mpi_waitall(2, request, MPI_STATUSES_IGNORE, error)
    else
      statuses = -77
      call mpi_waitall(2, request, statuses, error)
      if (any(statuses(1, :) == -77)) stop 6
    end if
    if (any(sums /= ranks*mine)) stop 7
    ! What is gathered from three ranks, in the opposite order, and in place.
    whole = rank + turn
    call mpi_allgather(whole, 7, MPI_INTEGER, every, 7, MPI_INTEGER, MPI_COMM_WORLD, error)
    if (any(every(15:21) /= 2 + turn) .or. any(every(1:7) /= turn)) stop 21
    counts = (/ 1, 2, 3 /)
    places = (/ 5, 3, 0 /)
    every = -1
    call mpi_allgatherv(whole, rank + 1, MPI_INTEGER, every, counts, places, MPI_INTEGER, &
                        MPI_COMM_WORLD, error)
    if (any(every(1:6) /= (/ 2, 2, 2, 1, 1, 0 /) + turn) .or. any(every(7:) /= -1)) stop 22
    every(places(rank + 1) + 1) = 50 + rank
    call mpi_allgatherv(MPI_IN_PLACE, 0, MPI_INTEGER, every, counts, places, MPI_INTEGER, &
                        MPI_COMM_WORLD, error)
    if (every(1) /= 52 .or. every(4) /= 51 .or. every(6) /= 50) stop 23
    ! Blocks of one to three elements, and of two each in place.
    whole = rank + turn
    call mpi_reduce_scatter(whole, every, counts, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, error)
    if (any(every(1:rank + 1) /= 3 + 3*turn)) stop 31
    every = rank + turn
    call mpi_reduce_scatter_block(MPI_IN_PLACE, every, 2, MPI_INTEGER, MPI_MAX, MPI_COMM_WORLD, &
                                  error)
    if (any(every(1:2) /= 2 + turn) .or. any(every(7:) /= rank + turn)) stop 32
    ! The MPI's own, of which a profile has a record.
    call mpi_alltoall(whole, 1, MPI_INTEGER, every, 1, MPI_INTEGER, MPI_COMM_WORLD, error)
    if (any(every(1:3) /= (/ 0, 1, 2 /) + turn)) stop 24
    call mpi_scan(whole, every, 7, MPI_INTEGER, MPI_SUM, MPI_COMM_WORLD, error)
    if (any(every(1:7) /= (rank + 1)*turn + rank*(rank + 1)/2)) stop 25
    call mpi_igather(whole, 1, MPI_INTEGER, every, 1, MPI_INTEGER, 0, MPI_COMM_WORLD, &
                     request(1), error)
    call mpi_wait(request(1), MPI_STATUS_IGNORE, error)
    if (rank == 0 .and. any(every(1:3) /= (/ 0, 1, 2 /) + turn)) stop 26
    ! Rank 0 comes late to what the others wait for, each time in another way.
    if (rank == 0) call pause_for(5)
    call mpi_ialltoall(whole, 1, MPI_INTEGER, every, 1, MPI_INTEGER, MPI_COMM_WORLD, waited(2), &
                       error)
    waited(1) = MPI_REQUEST_NULL
    done = .false.
    some = 0
    which = 2
    indices(1) = 2
    do while (.not. done)
      select case (mod(turn, 6))
      case (0)
        call mpi_test(waited(2), done, MPI_STATUS_IGNORE, error)
      case (1)
        call mpi_testall(2, waited, done, MPI_STATUSES_IGNORE, error)
      case (2)
        call mpi_testany(2, waited, which, done, status, error)
      case (3)
        call mpi_testsome(2, waited, some, indices, statuses, error)
        done = some > 0
      case (4)
        call mpi_waitany(2, waited, which, status, error)
        done = .true.
      case (5)
        call mpi_waitsome(2, waited, some, indices, MPI_STATUSES_IGNORE, error)
        done = some == 1
      end select
      if (error /= MPI_SUCCESS) stop 41
    end do
    if (which /= 2 .or. indices(1) /= 2 .or. waited(2) /= MPI_REQUEST_NULL) stop 42
    if (any(every(1:3) /= (/ 0, 1, 2 /) + turn)) stop 43
    call mpi_waitany(2, waited, which, MPI_STATUS_IGNORE, error)
    call mpi_waitsome(2, waited, some, indices, MPI_STATUSES_IGNORE, error)
    if (which /= MPI_UNDEFINED .or. some /= MPI_UNDEFINED) stop 44
    call mpi_testany(2, waited, which, done, MPI_STATUS_IGNORE, error)
    if (.not. done .or. which /= MPI_UNDEFINED) stop 45
    ! A request that has ended is a null request.
    call mpi_wait(request(1), status, error)
    if (error /= MPI_SUCCESS) stop 8
  end do
  if (rank == 0) print *, 'all right'
  call mpi_finalize(error)
contains
  subroutine pause_for(milliseconds)
    integer, intent(in) :: milliseconds
    integer(kind=8) :: begin, now, rate
    call system_clock(begin, rate)
    now = begin
    do while (now - begin < milliseconds*rate/1000)
      call system_clock(now)
    end do
  end subroutine
end program
