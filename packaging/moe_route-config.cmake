# moe_route-config.cmake: the targets of moe_route, for find_package() in an installed tree and for CMakeLists.txt in the
# source tree. It finds its files by where it lies itself, so that an installed tree may be moved.
#
#   moe_route::moe_route   the header and what its implementation links with. One source file of the program defines
#                          MOE_ROUTE_IMPLEMENTATION
#   moe_route::impl        the implementation, compiled once as a static library in the including project; no file of the
#                          program defines MOE_ROUTE_IMPLEMENTATION

include(CMakeFindDependencyMacro)
find_dependency(Threads)

set(moe_route_FOUND TRUE)
if(EXISTS "${CMAKE_CURRENT_LIST_DIR}/../moe_route.h")
  get_filename_component(moe_route_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
else()
  get_filename_component(moe_route_INCLUDE_DIR "${CMAKE_CURRENT_LIST_DIR}/../../include" ABSOLUTE)
endif()

if(NOT TARGET moe_route)
  add_library(moe_route INTERFACE)
  add_library(moe_route::moe_route ALIAS moe_route)
  target_include_directories(moe_route INTERFACE "${moe_route_INCLUDE_DIR}")
  target_link_libraries(moe_route INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
  if(NOT WIN32)
    target_link_libraries(moe_route INTERFACE m)
  endif()

  add_library(moe_route_impl STATIC EXCLUDE_FROM_ALL "${CMAKE_CURRENT_LIST_DIR}/moe_route.c")
  add_library(moe_route::impl ALIAS moe_route_impl)
  target_link_libraries(moe_route_impl PUBLIC moe_route)
  set_target_properties(moe_route_impl PROPERTIES POSITION_INDEPENDENT_CODE ON)
  get_property(moe_route_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
  if(NOT "C" IN_LIST moe_route_languages) # it is C++, too
    set_source_files_properties("${CMAKE_CURRENT_LIST_DIR}/moe_route.c" PROPERTIES LANGUAGE CXX)
  endif()
  unset(moe_route_languages)
endif()
