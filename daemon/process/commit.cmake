# Writes commit.h, which names the commit that is built: cmake -DSOURCE=tree -DOUT=commit.h -P
# commit.cmake. It runs with every build; the file changes only with the commit.
# A tree that is not git's own (a tarball, a copy inside another's checkout) has none.
set(commit "unknown")
execute_process(COMMAND git -C ${SOURCE} rev-parse --show-toplevel
  OUTPUT_VARIABLE top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
file(REAL_PATH ${SOURCE} source)
if(NOT failed AND top STREQUAL source)
  execute_process(COMMAND git --no-optional-locks -C ${SOURCE} describe --always --dirty --abbrev=12
    OUTPUT_VARIABLE said OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed AND said MATCHES "^[A-Za-z0-9._/+-]+$")
    set(commit "${said}")
  endif()
endif()
set(text "#define ATTND_COMMIT \"${commit}\"\n")
set(before "")
if(EXISTS ${OUT})
  file(READ ${OUT} before)
endif()
if(NOT before STREQUAL text)
  file(WRITE ${OUT} "${text}")
endif()
