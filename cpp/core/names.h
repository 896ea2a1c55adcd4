// Enums by name: an array holds the names of all values, in the order of the enum.
#ifndef SOK_CORE_NAMES_H_
#define SOK_CORE_NAMES_H_

#include <cstddef>
#include <stdexcept>
#include <string>

namespace sok {

// Throws std::invalid_argument with the requirement and what was received.
template <typename Enum, size_t kSize>
Enum ValueNamed(const std::string& name, const char* const (&names)[kSize],
                const std::string& requirement) {
  for (size_t i = 0; i < kSize; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  throw std::invalid_argument(requirement + ". Received: '" + name + "'");
}

}  // namespace sok

#endif  // SOK_CORE_NAMES_H_
