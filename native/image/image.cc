#include "image/pipeline.h"
