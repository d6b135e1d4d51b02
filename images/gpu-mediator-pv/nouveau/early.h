/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* What every source of nouveau begins with, and what the kernel's makefiles put before each. */
#ifndef GMPV_NOUVEAU_EARLY_H
#define GMPV_NOUVEAU_EARLY_H

#include <linux/kconfig.h>
#include <linux/compiler_types.h>
#include <nvif/os.h>

#endif
