# Plants bugs in copies of sources, as controls: a test must find each. Included by a list of bugs,
# which is run as cmake -DFROM=dir -DTO=dir -P list.cmake.
#   plant(number file good bad)
# `good` must be in FROM/file exactly once; `bad` stands for it in TO/file and asks a switch whether
# the number is on. PLANT_HEAD goes before every file's text. When a source changes so that a text
# is gone, plant the same bug in the new text.
function(plant number file good bad)
  if(NOT DEFINED text_${file})
    file(READ ${FROM}/${file} text)
    string(REPLACE ";" "@semicolon@" text "${PLANT_HEAD}${text}")
  else()
    set(text "${text_${file}}")
  endif()
  string(REPLACE ";" "@semicolon@" good "${good}")
  string(REPLACE ";" "@semicolon@" bad "${bad}")
  string(FIND "${text}" "${good}" first)
  string(FIND "${text}" "${good}" last REVERSE)
  if(first EQUAL -1 OR NOT first EQUAL last)
    message(FATAL_ERROR "planted bug ${number}: '${good}' is not in ${file} exactly once")
  endif()
  string(REPLACE "${good}" "${bad}" text "${text}")
  set(text_${file} "${text}" PARENT_SCOPE)
  string(REPLACE "@semicolon@" ";" text "${text}")
  file(WRITE ${TO}/${file} "${text}")
endfunction()
