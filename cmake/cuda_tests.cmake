# Tests of the CUDA backend, never installed. Without CUDA: its sources compiled for the CPU, against
# the emulator in cpp/tests/emulator/. With CUDA: the same tests on a device, which `ctest -L device`
# needs. (A source has one language in a build, so a build with CUDA has no emulator.)
if(SOK_CUDA)
  file(GLOB sources CONFIGURE_DEPENDS cpp/tests/cuda/*_test.cc)
  # Of the emulator itself, and of what runs on the host alone.
  list(FILTER sources EXCLUDE REGEX "(emulator|probe|held_mutex)_test.cc$")
  # It reads a header of kernels.
  set_source_files_properties(cpp/tests/cuda/lowest_test.cc PROPERTIES LANGUAGE CUDA)
  foreach(source ${sources})
    get_filename_component(name ${source} NAME_WE)
    add_executable(cuda_${name} ${source} cpp/tests/cuda/on_device.cc)
    target_link_libraries(cuda_${name} PRIVATE sok_cuda)
    target_compile_definitions(cuda_${name} PRIVATE SOK_TESTS_ON_DEVICE)
    add_test(NAME cuda_${name} COMMAND cuda_${name})
    set_tests_properties(cuda_${name} PROPERTIES LABELS device)
  endforeach()
else()
  file(GLOB SOK_CUDA_SOURCES CONFIGURE_DEPENDS cpp/core/cuda/*/*.cu)
  set_source_files_properties(${SOK_CUDA_SOURCES} PROPERTIES LANGUAGE CXX)
  add_library(sok_cuda_emulated STATIC ${SOK_CUDA_SOURCES})
  target_include_directories(sok_cuda_emulated PUBLIC cpp/tests/emulator)
  # g++ does not see that a value is read only where it was loaded. Compiling takes longer than
  # running, so little is optimised.
  target_compile_options(sok_cuda_emulated PUBLIC -Wno-unknown-pragmas -Wno-maybe-uninitialized
    -fno-strict-aliasing -O1)
  target_link_libraries(sok_cuda_emulated PUBLIC sok_core)
  sok_unity(sok_cuda_emulated)
  file(GLOB sources CONFIGURE_DEPENDS cpp/tests/cuda/*_test.cc)
  if(SOK_SANITIZE MATCHES thread)
    # It does not know fibers. The state machine has a test with real threads.
    set(sources cpp/tests/cuda/probe_test.cc)
  endif()
  foreach(source ${sources})
    get_filename_component(name ${source} NAME_WE)
    add_executable(cuda_${name} ${source})
    target_link_libraries(cuda_${name} PRIVATE sok_cuda_emulated)
    add_test(NAME cuda_${name} COMMAND cuda_${name})
  endforeach()
  if(SOK_WITH_PYTHON)
    # The bindings, for the tests in tests/cuda.
    file(GLOB sources CONFIGURE_DEPENDS cpp/python/*.cc cpp/python/cuda/*.cc)
    pybind11_add_module(_cuda_emulated MODULE NO_EXTRAS ${sources} cpp/tests/emulator/module.cc)
    target_link_libraries(_cuda_emulated PRIVATE sok_cuda_emulated)
    target_compile_options(_cuda_emulated PRIVATE -O0)
    sok_unity(_cuda_emulated)
  endif()
  if(SOK_WITH_TF)
    # The op library with the kernels of device tables in the place of the CPU's. Never beside
    # `_ops`: a process can register an op but once.
    set(sources ${SOK_TF_CUDA_SOURCES} cpp/tests/emulator/tf_stream.cc)
    list(FILTER sources EXCLUDE REGEX "cpp/tf/cuda/stream.cc")
    add_library(_ops_emulated MODULE ${sources})
    set_target_properties(_ops_emulated PROPERTIES PREFIX "")
    target_link_libraries(_ops_emulated PRIVATE sok_tf sok_cuda_emulated)
    sok_unity(_ops_emulated)
    target_compile_definitions(_ops_emulated PRIVATE SOK_TF_DEVICE="CPU" SOK_TF_PRIORITY=1)
  endif()
endif()
