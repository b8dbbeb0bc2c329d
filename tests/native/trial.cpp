// Whether a child lives to say that something works.

#include "trial.h"

extern "C" int trial(int which) {
    switch (which) {
        case 0: return works_in_a_child([] { return true; });
        case 1: return works_in_a_child([] { return false; });
        case 2: return works_in_a_child([] { __builtin_trap(); return true; });
        case 3: return works_in_a_child([] { return raise(SIGILL) == 0; });
        default:
            return works_in_a_child([]() -> bool { for (volatile bool goes_on = true; goes_on;) {} return true; }, 50);
    }
}
