# Run when attnd is installed. ${source} and ${build} are the folders of the tree and of the build;
# ${has_gpu}: there are GPU modules.
set(etc "${CMAKE_INSTALL_PREFIX}/etc/attnd")
if(CMAKE_INSTALL_PREFIX STREQUAL "/usr")
  set(etc /etc/attnd)
endif()
if(NOT EXISTS "$ENV{DESTDIR}${etc}/attnd.conf")
  file(INSTALL "${source}/systemd/attnd.conf" DESTINATION "${etc}")
endif()

file(READ "${source}/systemd/attnd.service" unit)
string(REPLACE "/usr/" "${CMAKE_INSTALL_PREFIX}/" unit "${unit}")
file(WRITE "${build}/attnd.service" "${unit}")
set(units "${CMAKE_INSTALL_PREFIX}/lib/systemd/system")
file(INSTALL "${build}/attnd.service" "${source}/systemd/attnd-http.socket" DESTINATION "${units}")
if(has_gpu)
  file(INSTALL "${source}/systemd/gpu.conf" DESTINATION "${units}/attnd.service.d")
endif()
