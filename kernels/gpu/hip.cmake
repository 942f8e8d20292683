# attnd-hip.so: the loadable HIP backend. CMake's own HIP language does not find Debian's ROCm, so
# device code is compiled by commands, one code object a kernel file and device: by hipcc, and for
# gfx942, which Debian 12's hipcc does not know, by clang++-19 with Debian's device libraries. The
# code objects of a file become one bundle, which its host part takes in.
set(hip_clang 0)
if(ATTND_HIPCC)
  # what it prints of the device here, or that there is none, goes elsewhere
  execute_process(COMMAND ${ATTND_HIPCC} --version OUTPUT_VARIABLE said ERROR_QUIET)
  if(said MATCHES "clang version ([0-9]+)")
    set(hip_clang ${CMAKE_MATCH_1})
  endif()
endif()
find_library(ATTND_AMDHIP64 amdhip64 PATHS /opt/rocm/lib)
find_path(ATTND_HIP_INCLUDE hip/hip_runtime_api.h PATHS /opt/rocm/include)
find_program(ATTND_OFFLOAD_BUNDLER clang-offload-bundler
  PATHS /usr/lib/llvm-${hip_clang}/bin /opt/rocm/llvm/bin)
if(NOT ATTND_HIPCC OR NOT ATTND_AMDHIP64 OR NOT ATTND_HIP_INCLUDE OR NOT ATTND_OFFLOAD_BUNDLER)
  message(FATAL_ERROR "ATTND_HIP wants hipcc, clang-offload-bundler, libamdhip64 and the HIP headers "
    "(Debian: hipcc)")
endif()

# gfx942 is built where its compiler is: a hipcc with clang 17 or newer is one. Debian 12's knows
# only gfx940, the same chip before it was sold, which is built where there is no other: that its
# kernels compile.
set(hipcc_knows_gfx942 FALSE)
if(hip_clang GREATER_EQUAL 17)
  set(hipcc_knows_gfx942 TRUE)
endif()
find_program(ATTND_CLANGXX19 clang++-19)
find_program(ATTND_LLD19 lld PATHS /usr/lib/llvm-19/bin NO_DEFAULT_PATH)
find_program(ATTND_CLANG15 clang-15)
set(archs "gfx90a;gfx940")
if(hipcc_knows_gfx942 OR (ATTND_CLANGXX19 AND ATTND_LLD19 AND ATTND_CLANG15))
  set(archs "gfx90a;gfx942")
endif()
set(ATTND_HIP_ARCHS ${archs} CACHE STRING "Devices to build for")
message(STATUS "HIP devices: ${ATTND_HIP_ARCHS}")

set(gfx942_compile ${ATTND_HIPCC})
if("gfx942" IN_LIST ATTND_HIP_ARCHS AND NOT hipcc_knows_gfx942)
  if(NOT ATTND_CLANGXX19 OR NOT ATTND_LLD19 OR NOT ATTND_CLANG15)
    message(FATAL_ERROR "gfx942 wants clang-19, lld-19 and clang-15, or a hipcc with clang 17")
  endif()
  # Debian's device libraries lack one constant of gfx942: the version of its instruction set.
  set(lib ${CMAKE_CURRENT_BINARY_DIR}/device-lib)
  file(MAKE_DIRECTORY ${lib})
  file(GLOB bitcode /usr/lib/x86_64-linux-gnu/amdgcn/bitcode/*.bc)
  foreach(b IN LISTS bitcode)
    get_filename_component(n ${b} NAME)
    file(CREATE_LINK ${b} ${lib}/${n} SYMBOLIC)
  endforeach()
  file(WRITE ${lib}/isa.c "extern const __attribute__((address_space(4), visibility(\"hidden\"))) int
    __oclc_ISA_version;\nconst __attribute__((address_space(4), visibility(\"hidden\"))) int
    __oclc_ISA_version = 9402;\n")
  execute_process(COMMAND ${ATTND_CLANG15} -target amdgcn-amd-amdhsa -nogpulib -emit-llvm -c -O1
    ${lib}/isa.c -o ${lib}/oclc_isa_version_942.bc COMMAND_ERROR_IS_FATAL ANY)
  set(gfx942_compile ${ATTND_CLANGXX19} --rocm-path=/usr --hip-version=5.2.21153
    --rocm-device-lib-path=${lib} -mcode-object-version=4)
endif()

set(hip_flags -x hip -std=c++17 -O3 -fPIC -fvisibility=hidden -fno-exceptions -Wall
  -Wno-unused-function -I${CMAKE_SOURCE_DIR})
if(ATTND_WERROR)
  list(APPEND hip_flags -Werror)
endif()

set(hip_objects)
set(rung_objects) # attnbench's, for a module of their own
set(out ${CMAKE_CURRENT_BINARY_DIR}/hip)
file(MAKE_DIRECTORY ${out})
foreach(file prep attend_vector attend_matrix_bf16 attend_matrix_f16 blocks choose heads/heads sums merge
    ../bench/read ../bench/project ../bench/ladder ../bench/rungs/rung_naive ../bench/rungs/rung_vectorised
    ../bench/rungs/rung_shared ../bench/rungs/rung_warp ../bench/rungs/rung_matrix ../bench/rungs/encoder)
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/${file}.cu)
  get_filename_component(k ${file} NAME)
  set(codes)
  set(bundle --type=o --bundle-align=4096 --input=/dev/null)
  set(targets host-${CMAKE_SYSTEM_PROCESSOR}-unknown-linux)
  foreach(arch IN LISTS ATTND_HIP_ARCHS)
    set(compile_${arch} ${ATTND_HIPCC})
    if(arch STREQUAL gfx942)
      set(compile_${arch} ${gfx942_compile})
    endif()
    list(APPEND compile_${arch} ${hip_flags} --offload-arch=${arch} --cuda-device-only
      --no-gpu-bundle-output)
    set(code ${out}/${k}.${arch}.co)
    add_custom_command(OUTPUT ${code}
      COMMAND ${compile_${arch}} -MD -MF ${code}.d -MT ${code} -c ${source} -o ${code}
      DEPENDS ${source} DEPFILE ${code}.d COMMENT "Building HIP code of ${k} for ${arch}" VERBATIM)
    list(APPEND codes ${code})
    list(APPEND bundle --input=${code})
    string(APPEND targets ,hipv4-amdgcn-amd-amdhsa--${arch})
    if(NOT file MATCHES "/rungs/") # for the tests' gates
      set_property(GLOBAL APPEND PROPERTY ATTND_HIP_CODE_${arch} ${code})
    endif()
    set_property(GLOBAL PROPERTY ATTND_HIP_COMPILE_${arch} ${compile_${arch}})
  endforeach()
  set(o ${out}/${k}.o)
  add_custom_command(OUTPUT ${o}
    COMMAND ${ATTND_OFFLOAD_BUNDLER} ${bundle} --targets=${targets} --output=${out}/${k}.fatbin
    COMMAND ${ATTND_HIPCC} ${hip_flags} --offload-arch=gfx90a --cuda-host-only
      -Xclang -fcuda-include-gpubinary -Xclang ${out}/${k}.fatbin
      -MD -MF ${o}.d -MT ${o} -c ${source} -o ${o}
    DEPENDS ${source} ${codes} DEPFILE ${o}.d COMMENT "Building HIP object ${k}.o" VERBATIM)
  if(file MATCHES "/rungs/")
    list(APPEND rung_objects ${o})
  else()
    list(APPEND hip_objects ${o})
  endif()
endforeach()
set_source_files_properties(${hip_objects} ${rung_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)

add_library(attnd-hip MODULE
  backend_gpu.c gpu_device.c gpu_pool.c gpu_job.c gpu_select.c gpu_launch.c gpu_choose.c gpu_shared.c heads/gpu_heads.c gpu_queue.c
  gpu_moves.c gpu_peers.c ../bench/gpu_bench.c sm90/none.c
  vendor/runtime_hip.c ${hip_objects})
set_target_properties(attnd-hip PROPERTIES PREFIX "" C_VISIBILITY_PRESET hidden
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/attnd
  LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/module.map)
target_include_directories(attnd-hip SYSTEM PRIVATE ${ATTND_HIP_INCLUDE})
list(JOIN ATTND_HIP_ARCHS ", " archs)
target_compile_definitions(attnd-hip PRIVATE GPU_BACKEND_NAME="hip" __HIP_PLATFORM_AMD__=1
  ATTND_HIP_ARCHS="${archs}")
target_link_libraries(attnd-hip PRIVATE kernels ${ATTND_AMDHIP64})
target_link_options(attnd-hip PRIVATE
  LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/module.map)
if(NOT ATTND_SANITIZE)
  target_link_options(attnd-hip PRIVATE LINKER:-z,defs)
endif()
install(TARGETS attnd-hip LIBRARY DESTINATION lib/attnd)

# attnd-hipbench.so: attnbench's rungs (bench/rungs/rungs.h), apart from what serves requests.
add_library(attnd-hipbench MODULE ../bench/rungs/rungs_gpu.c vendor/runtime_hip.c ${out}/read.o
  ${rung_objects})
set_target_properties(attnd-hipbench PROPERTIES PREFIX "" C_VISIBILITY_PRESET hidden
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/attnd
  LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/module.map)
target_include_directories(attnd-hipbench SYSTEM PRIVATE ${ATTND_HIP_INCLUDE})
target_compile_definitions(attnd-hipbench PRIVATE GPU_BACKEND_NAME="hip" __HIP_PLATFORM_AMD__=1
  ATTND_HIP_ARCHS="${archs}")
target_link_libraries(attnd-hipbench PRIVATE attn_types ${ATTND_AMDHIP64} ${CMAKE_DL_LIBS})
target_link_options(attnd-hipbench PRIVATE
  LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/module.map)
if(NOT ATTND_SANITIZE)
  target_link_options(attnd-hipbench PRIVATE LINKER:-z,defs)
endif()
install(TARGETS attnd-hipbench LIBRARY DESTINATION lib/attnd)
