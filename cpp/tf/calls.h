// Numbers the calls of each lookup, by name, to distinguish a call from the one before it.
#ifndef SOK_TF_CALLS_H_
#define SOK_TF_CALLS_H_

#include <string>

#include "cpp/core/cpu/message.h"

namespace sok {

// The next call of a lookup on a line of this process: a process that is one rank has line 0, one
// whose threads are ranks a line for each.
Call NextCall(const std::string& lookup, int64_t line, Stage stage, Wire wire);

// Continues counting from a call that another rank was found in, so that all ranks number the next
// call alike after one of them missed some.
void CatchUp(const Call& call);

}  // namespace sok

#endif  // SOK_TF_CALLS_H_
