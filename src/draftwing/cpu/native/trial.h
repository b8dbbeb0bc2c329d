// Tries instructions that may kill the process in a child process.

#pragma once

#if defined(__linux__)

#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

namespace {

// Returns whether a child process reports success within a number of milliseconds.
//
// Some virtual processors advertise instructions and kill processes that use them. The child is created by the bare system
// call: it runs none of this process's handlers, sends it no signal, and may do nothing but compute.
bool works_in_a_child(bool (*works)(), int patience = 5000) {
    const pid_t child = static_cast<pid_t>(syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr));
    if (child < 0) return false;
    if (child == 0) {
        const int crashes[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP};
        for (const int crash : crashes) signal(crash, SIG_DFL);
        const rlimit no_core{0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        syscall(SYS_exit_group, works() ? 0 : 1);
    }
    const timespec moment{0, 200000};
    int status = -1;
    for (int turn = 0; turn < 5 * patience; ++turn) {
        const pid_t ended = waitpid(child, &status, WNOHANG | __WALL);
        if (ended == child) return WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (ended < 0) return false;
        nanosleep(&moment, nullptr);
    }
    kill(child, SIGKILL);
    waitpid(child, &status, __WALL);
    return false;
}

}  // namespace

#endif
