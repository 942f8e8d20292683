#include "proto/wire.h"
