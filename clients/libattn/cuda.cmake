# Needs nvcc to build and nothing but libc to load: the runtime is linked in and finds the driver by
# itself, and shares the process's primary context.
if(NOT DEFINED CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${ATTND_NVCC})
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80) # the target names its own
endif()
enable_language(CUDA)
# CMake 3.25's module ends where a toolkit has no libnvToolsExt, as CUDA 13 has none, but for who
# asks for an older CMake.
set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
find_package(CUDAToolkit REQUIRED)

get_property(cuda_archs GLOBAL PROPERTY ATTND_CUDA_ARCHS) # kernels/gpu/cuda.cmake
add_library(attn-cuda SHARED memory/cuda.cu)
set_target_properties(attn-cuda PROPERTIES CUDA_STANDARD 17 CUDA_RUNTIME_LIBRARY Static
  CUDA_ARCHITECTURES "${cuda_archs}" CUDA_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON VERSION ${PROJECT_VERSION} SOVERSION 0)
target_include_directories(attn-cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_include_directories(attn-cuda PRIVATE ${CMAKE_SOURCE_DIR}/proto)
target_link_libraries(attn-cuda PRIVATE CUDA::cudart_static)
target_link_options(attn-cuda PRIVATE -Wl,--exclude-libs,ALL -Wl,--as-needed -Wl,-z,defs
  -static-libgcc -static-libstdc++)
install(TARGETS attn-cuda)
