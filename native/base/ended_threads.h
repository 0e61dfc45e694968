// base/ended_threads.h - lets a program of Python end while its threads are in native code.
#pragma once

namespace nostall {

// Python before 3.14 ends a thread that asks for its lock after it began to shut down, by pthread_exit.
// That unwinds the thread's stack: the first C++ frame that lets no exception through ends the process
// (SIGABRT), and frames that give the lock back do so without having it. From this call on such a thread
// sleeps first, until the process ends, as Python 3.14 lets it; after ten seconds it ends as it would
// have, because a library that joins its threads while the process ends waits as long.
//
// `interpreter` is any function of Python's; calls of pthread_exit from its executable or library come
// here first. `shuts_down` says whether Python shuts down; any thread calls it. The thread that ends
// the program calls this; a later call changes the thread alone. Not thread-safe.
//
// Returns false if threads end as before: the interpreter's import of pthread_exit was not found (another
// processor than x86-64 and aarch64, a library of C other than glibc), or cannot be written.
bool keep_ended_threads(const void* interpreter, int (*shuts_down)());

}  // namespace nostall
