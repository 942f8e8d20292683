# attnd-hip.so: the loadable HIP backend. CMake's own HIP language does not find Debian's ROCm, so device
# code is compiled by commands: hipcc, or for gfx942, which Debian's hipcc does not know, clang++-19 with
# Debian's device libraries.
set(ATTND_HIP_ARCHS "gfx90a;gfx940" CACHE STRING "Devices to build for; gfx942 wants clang++-19")
find_library(ATTND_AMDHIP64 amdhip64 PATHS /opt/rocm/lib)
find_path(ATTND_HIP_INCLUDE hip/hip_runtime_api.h PATHS /opt/rocm/include)
if(NOT ATTND_HIPCC OR NOT ATTND_AMDHIP64 OR NOT ATTND_HIP_INCLUDE)
  message(FATAL_ERROR "ATTND_HIP wants hipcc, libamdhip64 and the HIP headers (Debian: hipcc)")
endif()

set(hip_compile ${ATTND_HIPCC})
if("gfx942" IN_LIST ATTND_HIP_ARCHS AND ATTND_HIPCC STREQUAL /usr/bin/hipcc)
  find_program(ATTND_CLANGXX19 clang++-19 REQUIRED)
  find_program(ATTND_CLANG15 clang-15 REQUIRED)
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
  set(hip_compile ${ATTND_CLANGXX19} --rocm-path=/usr --hip-version=5.2.21153
    --rocm-device-lib-path=${lib} -mcode-object-version=4)
endif()

list(TRANSFORM ATTND_HIP_ARCHS PREPEND --offload-arch= OUTPUT_VARIABLE hip_archs)
set(hip_flags -x hip -std=c++17 -O3 -fPIC -fvisibility=hidden -fno-exceptions -Wall
  -Wno-unused-function -I${CMAKE_SOURCE_DIR} ${hip_archs})
if(ATTND_WERROR)
  list(APPEND hip_flags -Werror)
endif()

set(hip_objects)
foreach(k prep attend_vector attend_matrix_bf16 attend_matrix_f16 attend_codes_none ladder)
  set(o ${CMAKE_CURRENT_BINARY_DIR}/hip/${k}.o)
  add_custom_command(OUTPUT ${o}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/hip
    COMMAND ${hip_compile} ${hip_flags} -MD -MF ${o}.d -MT ${o}
      -c ${CMAKE_CURRENT_SOURCE_DIR}/${k}.cu -o ${o}
    DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${k}.cu DEPFILE ${o}.d
    COMMENT "Building HIP object ${k}.o" VERBATIM)
  list(APPEND hip_objects ${o})
endforeach()
set_source_files_properties(${hip_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
set_property(GLOBAL PROPERTY ATTND_HIP_OBJECTS ${hip_objects}) # for the tests' gates
set_property(GLOBAL PROPERTY ATTND_HIP_COMPILE ${hip_compile} ${hip_flags})

add_library(attnd-hip MODULE
  backend_gpu.c gpu_job.c gpu_queue.c gpu_bench.c decode_none.c runtime_hip.c ${hip_objects})
set_target_properties(attnd-hip PROPERTIES PREFIX "" C_VISIBILITY_PRESET hidden
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib/attnd
  LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/module.map)
target_include_directories(attnd-hip SYSTEM PRIVATE ${ATTND_HIP_INCLUDE})
target_compile_definitions(attnd-hip PRIVATE GPU_BACKEND_NAME="hip" __HIP_PLATFORM_AMD__=1)
target_link_libraries(attnd-hip PRIVATE kernels ${ATTND_AMDHIP64})
target_link_options(attnd-hip PRIVATE
  LINKER:--version-script=${CMAKE_CURRENT_SOURCE_DIR}/module.map)
if(NOT ATTND_SANITIZE)
  target_link_options(attnd-hip PRIVATE LINKER:-z,defs)
endif()
install(TARGETS attnd-hip LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/attnd)
