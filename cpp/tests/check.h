// CHECK: a test is a program that exits with 1 after printing what failed.
#ifndef SOK_TESTS_CHECK_H_
#define SOK_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <string>

namespace sok {

inline void CheckFailed(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what.c_str());
  std::exit(1);
}

}  // namespace sok

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) ::sok::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (0)

// Both sides must be numbers; they are printed.
#define CHECK_EQ(a, b)                                                                       \
  do {                                                                                       \
    const auto check_a = (a);                                                                \
    const auto check_b = (b);                                                                \
    if (!(check_a == check_b)) {                                                             \
      ::sok::CheckFailed(__FILE__, __LINE__,                                                 \
                         std::string(#a " == " #b ", received ") + std::to_string(check_a) + \
                             " and " + std::to_string(check_b));                             \
    }                                                                                        \
  } while (0)

// The statement must throw that exception, with `text` in its message.
#define CHECK_THROWS(statement, Exception, text)                                                \
  do {                                                                                          \
    bool thrown = false;                                                                        \
    try {                                                                                       \
      statement;                                                                                \
    } catch (const Exception& e) {                                                              \
      thrown = std::string(e.what()).find(text) != std::string::npos;                           \
      if (!thrown) ::sok::CheckFailed(__FILE__, __LINE__, std::string("message: ") + e.what()); \
    }                                                                                           \
    if (!thrown) ::sok::CheckFailed(__FILE__, __LINE__, #statement " throws " #Exception);      \
  } while (0)

#endif  // SOK_TESTS_CHECK_H_
