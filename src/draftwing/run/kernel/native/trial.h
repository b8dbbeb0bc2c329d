// Instructions that may end whoever uses them are tried by a child.

#pragma once

#if defined(__linux__)

#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

namespace {

// Whether a child process lives to say that something works, within so many milliseconds.
//
// Some virtual processors claim instructions and stop whoever uses them. The child is made by the system call alone: it
// runs no handlers of this process, whose own are not told of its end, and may do no more than compute.
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
