# Run by CPack over the staged tree: copies the libraries that the staged programs need into its lib/.
# libc and its parts stay with the system, and so does the GPU's driver.
file(GLOB programs LIST_DIRECTORIES false "${CPACK_TEMPORARY_DIRECTORY}/bin/*")
file(GLOB modules "${CPACK_TEMPORARY_DIRECTORY}/lib/attnd/*.so")
file(GET_RUNTIME_DEPENDENCIES
  EXECUTABLES ${programs}
  MODULES ${modules}
  RESOLVED_DEPENDENCIES_VAR found
  UNRESOLVED_DEPENDENCIES_VAR missing
  PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|resolv|util)\\.so" "^libcuda\\.so"
  POST_EXCLUDE_REGEXES "^${CPACK_TEMPORARY_DIRECTORY}/")
if(missing)
  message(FATAL_ERROR "libraries not found: ${missing}")
endif()
foreach(library IN LISTS found)
  file(COPY "${library}" DESTINATION "${CPACK_TEMPORARY_DIRECTORY}/lib" FOLLOW_SYMLINK_CHAIN)
endforeach()
