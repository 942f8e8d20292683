# Run by CPack over the staged tree: copies the libraries that the staged programs need into its
# lib/, and their licences into share/doc/attnd/licences/ where Debian's package database knows
# them. libc and its parts stay with the system, and so does the GPU's driver.
set(stage "${CPACK_TEMPORARY_DIRECTORY}")
file(GLOB programs LIST_DIRECTORIES false "${stage}/bin/*")
file(GLOB modules "${stage}/lib/attnd/*.so")
file(GET_RUNTIME_DEPENDENCIES
  EXECUTABLES ${programs}
  MODULES ${modules}
  RESOLVED_DEPENDENCIES_VAR found
  UNRESOLVED_DEPENDENCIES_VAR missing
  PRE_EXCLUDE_REGEXES "^ld-linux" "^lib(c|m|dl|rt|pthread|resolv|util)\\.so" "^libcuda\\.so"
  POST_EXCLUDE_REGEXES "^${stage}/")
if(missing)
  message(FATAL_ERROR "libraries not found: ${missing}")
endif()

# The package that owns a file, by either of the names a merged /usr gives it.
function(package_of library out)
  set(owner "")
  file(REAL_PATH "${library}" path)
  string(REGEX REPLACE "^/usr" "" short "${path}")
  foreach(name IN ITEMS "${path}" "${short}")
    execute_process(COMMAND dpkg-query -S "${name}" OUTPUT_VARIABLE line ERROR_QUIET)
    if(line MATCHES "^([^:,]+)")
      set(owner "${CMAKE_MATCH_1}")
      break()
    endif()
  endforeach()
  set(${out} "${owner}" PARENT_SCOPE)
endfunction()

# what has paths: the unit expects the tarball where the file system's standard has such packages,
# attn.pc finds its folders from its own
set(unit "${stage}/lib/systemd/system/attnd.service")
if(EXISTS "${unit}")
  file(READ "${unit}" text)
  string(REPLACE "${stage}/" "/opt/${CPACK_PACKAGE_FILE_NAME}/" text "${text}")
  file(WRITE "${unit}" "${text}")
  file(READ "${stage}/lib/pkgconfig/attn.pc" text)
  string(REGEX REPLACE "^prefix=[^\n]*" "prefix=\${pcfiledir}/../.." text "${text}")
  file(WRITE "${stage}/lib/pkgconfig/attn.pc" "${text}")
endif()

foreach(library IN LISTS found)
  file(COPY "${library}" DESTINATION "${stage}/lib" FOLLOW_SYMLINK_CHAIN)
  package_of("${library}" package)
  if(package AND EXISTS "/usr/share/doc/${package}/copyright")
    configure_file("/usr/share/doc/${package}/copyright"
      "${stage}/share/doc/attnd/licences/${package}" COPYONLY)
  else()
    message(STATUS "no licence file found for ${library}")
  endif()
endforeach()
