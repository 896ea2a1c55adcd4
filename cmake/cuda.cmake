# The CUDA backend, target `sok_cuda`: machine code for sm_80 and sm_90, and PTX for what comes after.
# Sets SOK_CUDA (whether it is built) and SOK_CUDA_LIBRARY (what to link, or nothing).
set(SOK_CUDA_ARCHITECTURES 80-real 90 CACHE STRING "What the CUDA backend is compiled for")
if(NOT SOK_WITH_CUDA MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "SOK_WITH_CUDA must be ON, OFF or AUTO. Received: ${SOK_WITH_CUDA}")
endif()
set(SOK_CUDA ${SOK_WITH_CUDA})
if(NOT SOK_WITH_CUDA STREQUAL OFF)
  include(cmake/nvcc.cmake)
  sok_choose_nvcc(/usr/local)
  include(CheckLanguage)
  check_language(CUDA)
endif()
if(SOK_WITH_CUDA STREQUAL AUTO)
  set(SOK_CUDA OFF)
  if(CMAKE_CUDA_COMPILER)
    set(SOK_CUDA ON)
  endif()
elseif(SOK_WITH_CUDA STREQUAL ON AND NOT CMAKE_CUDA_COMPILER)
  # Where nvcc is and does not work, CMake's own message says why.
  find_program(SOK_NVCC nvcc PATHS ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT SOK_NVCC)
    message(FATAL_ERROR "SOK_WITH_CUDA=ON needs nvcc of CUDA 12 or newer: put its bin folder on PATH, "
      "or name nvcc by -DCMAKE_CUDA_COMPILER=... or CUDACXX. OFF builds without it.")
  endif()
  set(CMAKE_CUDA_COMPILER ${SOK_NVCC})
endif()
set(SOK_CUDA_LIBRARY)
if(SOK_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES ${SOK_CUDA_ARCHITECTURES})
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12)
    message(FATAL_ERROR "The CUDA backend needs nvcc of CUDA 12 or newer. Received: "
      "${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION}")
  file(GLOB SOK_CUDA_SOURCES CONFIGURE_DEPENDS cpp/core/cuda/*/*.cu)
  add_library(sok_cuda STATIC ${SOK_CUDA_SOURCES})
  # No contraction into FMA: initial rows and updates have the bits of the CPU's.
  target_compile_options(sok_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-O3 -fmad=false
    $<$<BOOL:${SOK_WERROR}>:-Werror=all-warnings> $<$<BOOL:${SOK_WERROR}>:-Xcompiler=-Werror>
    -Xcompiler=-Wall,-Wextra,-Wno-unused-parameter
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
