#include "cache/kv.h"
