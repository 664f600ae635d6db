// shared_flash.cu -- what shared_flash.h declares.
#include "test/simt/shared_flash.h"

FLASH_KINDS(, true)
FLASH_KINDS(, false)
