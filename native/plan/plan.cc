#include "plan/bound.h"
