/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Headers at the start of every nouveau source, and those that the kernel's makefiles include before each source. */
#ifndef GMPV_NOUVEAU_EARLY_H
#define GMPV_NOUVEAU_EARLY_H

#include <linux/kconfig.h>
#include <linux/compiler_types.h>
#include <nvif/os.h>

#endif
