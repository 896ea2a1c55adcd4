# The CUDA backend, target `sok_cuda`: machine code for sm_80 and sm_90, and PTX for what comes after.
# Sets SOK_CUDA (whether it is built) and SOK_CUDA_LIBRARY (what to link, or nothing).
set(SOK_CUDA ${SOK_WITH_CUDA})
if(SOK_WITH_CUDA STREQUAL AUTO)
  include(CheckLanguage)
  check_language(CUDA)
  set(SOK_CUDA OFF)
  if(CMAKE_CUDA_COMPILER)
    set(SOK_CUDA ON)
  endif()
endif()
set(SOK_CUDA_LIBRARY)
if(SOK_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}")
  file(GLOB SOK_CUDA_SOURCES CONFIGURE_DEPENDS cpp/core/cuda/*.cu cpp/core/cuda/*.cc)
  add_library(sok_cuda STATIC ${SOK_CUDA_SOURCES})
  # No contraction into FMA: initial rows and updates have the bits of the CPU's.
  target_compile_options(sok_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-O3 -fmad=false
    -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror,-Wno-unused-parameter
    -Xcompiler=-fvisibility=hidden,-ffp-contract=off>)
  if(SOK_CUDA_REPORT)
    target_compile_options(sok_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
  endif()
  # The runtime is linked in and looks for the driver at the first call: a library built with CUDA
  # loads where there is neither.
  target_include_directories(sok_cuda PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_libraries(sok_cuda PUBLIC sok_core)
  set(SOK_CUDA_LIBRARY sok_cuda)
endif()
