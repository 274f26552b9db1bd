// The header needs nothing before it, and does not mind coming twice. Compiled as C99 and as C++17.
#include "les.h"
#include "les.h"

extern uint32_t (*const les_header_works)(void);
uint32_t (*const les_header_works)(void) = les_abi_version;
