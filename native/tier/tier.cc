#include "tier/node_cache.h"
