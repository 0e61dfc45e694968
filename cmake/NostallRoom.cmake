# One room of the native core: a static library of all its .cc files, with the warnings, the
# hardening and the sanitizers that every target of the project shares.
find_package(Threads REQUIRED)

add_library(nostall_options INTERFACE)
target_compile_options(nostall_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -fstack-protector-strong)
# A user's compiler may warn of what ours do not know yet: packages are built without.
option(NOSTALL_WERROR "Take warnings for errors" ON)
if(NOSTALL_WERROR)
  target_compile_options(nostall_options INTERFACE -Werror)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # Wrong about std::string at -O3 (GCC's bug 105651).
  target_compile_options(nostall_options INTERFACE -Wno-restrict)
endif()
if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  target_compile_options(nostall_options INTERFACE -Wthread-safety)
endif()
target_compile_definitions(nostall_options INTERFACE _GLIBCXX_ASSERTIONS _FILE_OFFSET_BITS=64)
target_include_directories(nostall_options INTERFACE "${CMAKE_CURRENT_SOURCE_DIR}/native")
target_link_libraries(nostall_options INTERFACE Threads::Threads)
if(NOSTALL_SANITIZE)
  target_compile_options(nostall_options INTERFACE
    -fsanitize=${NOSTALL_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_link_options(nostall_options INTERFACE -fsanitize=${NOSTALL_SANITIZE})
  if(NOSTALL_SANITIZE MATCHES "thread")
    # libstdc++ fences that ThreadSanitizer cannot see are a warning of gcc 12, not a defect here.
    target_compile_options(nostall_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-error=tsan>)
  endif()
else()
  target_compile_definitions(nostall_options INTERFACE _FORTIFY_SOURCE=2)
endif()

# nostall_room(<name> [DEPS room...] [LIBS library...])
function(nostall_room name)
  cmake_parse_arguments(ROOM "" "" "DEPS;LIBS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/*.cc")
  add_library(nostall_${name} STATIC ${sources})
  target_link_libraries(nostall_${name} PUBLIC nostall_options ${ROOM_LIBS})
  foreach(dep ${ROOM_DEPS})
    target_link_libraries(nostall_${name} PUBLIC nostall_${dep})
  endforeach()
endfunction()
