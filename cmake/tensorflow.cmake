# Imported target `tensorflow_framework`: the headers, library and flags of the TensorFlow that the
# building Python has. The version ends up in the op library's file, where native.py reads it.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cmake/tensorflow_config.py
  OUTPUT_VARIABLE SOK_TF_CONFIG OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
list(GET SOK_TF_CONFIG 0 SOK_TF_VERSION)
list(GET SOK_TF_CONFIG 1 SOK_TF_INCLUDE)
list(GET SOK_TF_CONFIG 2 SOK_TF_LIBRARY)
message(STATUS "TensorFlow ${SOK_TF_VERSION}")

add_library(tensorflow_framework SHARED IMPORTED)
set_target_properties(tensorflow_framework PROPERTIES IMPORTED_LOCATION ${SOK_TF_LIBRARY})
target_include_directories(tensorflow_framework SYSTEM INTERFACE ${SOK_TF_INCLUDE})
target_compile_definitions(tensorflow_framework INTERFACE
  EIGEN_MAX_ALIGN_BYTES=64 SOK_TF_VERSION="${SOK_TF_VERSION}")
