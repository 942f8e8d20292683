# attnd-cuda.so: the loadable CUDA backend. Needs nvcc to build and nothing but libc to load: the
# runtime is linked in and finds the driver by itself.
if(NOT DEFINED CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER ${ATTND_NVCC})
endif()
# Native code for sm_80 (sm_86 runs it) and sm_90, and what newer devices compile for themselves,
# for a minute at each start where the driver keeps nothing. Releases have code for all: sm_89
# converts fp8 by instructions of its own, sm_103 and sm_121 run what is for sm_100 and sm_120.
set(ATTND_CUDA_ARCHS "80;90a-real" CACHE STRING "Device code to build, as CMAKE_CUDA_ARCHITECTURES, or \"release\": for all devices")
set(ATTND_CUDA_AS "" CACHE STRING "For measurements on a later card: 80, 86 or 90, whose kernels are built from PTX for sm_80, without the tuned ones")
if(ATTND_CUDA_AS)
  set(ATTND_CUDA_ARCHS 80-virtual)
  set_source_files_properties(vendor/runtime_cuda.c PROPERTIES COMPILE_DEFINITIONS ATTND_CUDA_AS=${ATTND_CUDA_AS})
  add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-gencode=arch=compute_80,code=sm_90>") # of that PTX
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80) # each target names its own
endif()
enable_language(CUDA)
set(cuda_archs ${ATTND_CUDA_ARCHS})
if(ATTND_CUDA_ARCHS STREQUAL "release")
  set(cuda_archs 80 89-real 90a-real)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND cuda_archs 100-real 120-real)
  endif()
endif()
set_property(GLOBAL PROPERTY ATTND_CUDA_ARCHS "${cuda_archs}")
# CMake 3.25's module ends where a toolkit has no libnvToolsExt, as CUDA 13 has none, but for who
# asks for an older CMake.
set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
find_package(CUDAToolkit REQUIRED)

option(ATTND_CUDA_QUICK "Compile CUDA code quickly, to slow code that is not installed: where no device will run it" OFF)
if(ATTND_CUDA_QUICK)
  add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:--Ofast-compile=max>)
endif()
option(ATTND_RACECHECK "Tuned kernels as compute-sanitizer's racecheck can follow them (tests/kernels/README.md)" OFF)

# The tuned kernels are written in instructions that only sm_90a has.
set(tuned sm90/decode_select.c sm90/decode_fill.c sm90/prefill_plan.c sm90/decode_launch.cu
  sm90/prefill_launch.cu $<TARGET_OBJECTS:attnd-cuda-decode>)
if(ATTND_CUDA_AS)
  set(tuned sm90/none.c)
endif()
add_library(attnd-cuda-decode OBJECT EXCLUDE_FROM_ALL sm90/decode_bf16.cu sm90/decode_f16.cu sm90/prefill_bf16.cu
  sm90/prefill_f16.cu sm90/prefill_dilated_bf16.cu sm90/prefill_dilated_f16.cu
  sm90/trees/trees_bf16.cu sm90/trees/trees_f16.cu
  sm90/prefill_codes.cu sm90/prefill_codes_bf16.cu sm90/prefill_codes_f16.cu sm90/latent/latent_bf16.cu sm90/latent/latent_f16.cu)
set_target_properties(attnd-cuda-decode PROPERTIES CUDA_STANDARD 17 CUDA_ARCHITECTURES 90a-real
  POSITION_INDEPENDENT_CODE ON CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
target_include_directories(attnd-cuda-decode SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_compile_definitions(attnd-cuda-decode PRIVATE $<$<BOOL:${ATTND_RACECHECK}>:ATTND_RACECHECK>)
target_link_libraries(attnd-cuda-decode PRIVATE kernels)

add_library(attnd-cuda MODULE
  backend_gpu.c gpu_device.c gpu_pool.c gpu_job.c gpu_select.c gpu_launch.c gpu_choose.c gpu_shared.c heads/gpu_heads.c gpu_queue.c
  gpu_moves.c gpu_peers.c ../bench/gpu_bench.c vendor/runtime_cuda.c
  prep.cu blocks.cu choose.cu heads/heads.cu sums.cu merge.cu ../bench/read.cu ../bench/project.cu
  attend_vector.cu attend_matrix_bf16.cu attend_matrix_f16.cu attend_rows_bf16.cu attend_rows_f16.cu attend_codes.cu attend_f32.cu
  ../bench/ladder.cu ${tuned})
set_target_properties(attnd-cuda PROPERTIES PREFIX "" CUDA_STANDARD 17
  CUDA_RUNTIME_LIBRARY Static CUDA_ARCHITECTURES "${cuda_archs}"
  C_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/attnd)
target_include_directories(attnd-cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(attnd-cuda PRIVATE kernels CUDA::cudart_static)
target_link_options(attnd-cuda PRIVATE -Wl,--exclude-libs,ALL -Wl,--as-needed -Wl,-z,defs
  -static-libgcc -static-libstdc++
  LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/module.map)
set_target_properties(attnd-cuda PROPERTIES LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/module.map)

# attnd-cudabench.so: attnbench's rungs (bench/rungs/rungs.h), apart from what serves requests.
set(rungs ${CMAKE_CURRENT_SOURCE_DIR}/../bench/rungs)
add_library(attnd-cudabench MODULE ${rungs}/rungs_gpu.c vendor/runtime_cuda.c ../bench/read.cu
  ${rungs}/rung_naive.cu ${rungs}/rung_vectorised.cu ${rungs}/rung_shared.cu ${rungs}/rung_warp.cu
  ${rungs}/rung_matrix.cu ${rungs}/encoder.cu)
set_target_properties(attnd-cudabench PROPERTIES PREFIX "" CUDA_STANDARD 17
  CUDA_RUNTIME_LIBRARY Static CUDA_ARCHITECTURES "${cuda_archs}"
  C_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/attnd)
target_include_directories(attnd-cudabench SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(attnd-cudabench PRIVATE attn_types CUDA::cudart_static ${CMAKE_DL_LIBS})
target_link_options(attnd-cudabench PRIVATE -Wl,--exclude-libs,ALL -Wl,--as-needed -Wl,-z,defs
  -static-libgcc -static-libstdc++ LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/module.map)
set_target_properties(attnd-cudabench PROPERTIES LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/module.map)

if(ATTND_CUDA_QUICK OR ATTND_CUDA_AS)
  install(CODE "message(STATUS \"attnd-cuda.so is not installed: built with ATTND_CUDA_QUICK or ATTND_CUDA_AS\")")
else()
  install(TARGETS attnd-cuda attnd-cudabench LIBRARY DESTINATION lib/attnd)
endif()
