# Turns a file into a C array: cmake -DIN=file -DOUT=file.c -DNAME=symbol -P embed.cmake
file(READ ${IN} hex HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "((0x..,){20})" "\\1\n" bytes "${bytes}")
file(WRITE ${OUT} "#include <stddef.h>\n"
  "const unsigned char ${NAME}[] = {\n${bytes}\n};\nconst size_t ${NAME}_bytes = sizeof ${NAME};\n")
