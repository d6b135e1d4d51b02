// SPDX-License-Identifier: GPL-2.0-only OR MIT
// The device clears new instance memory.
// file: nvkm/subdev/instmem/base.c
// hook: gmpv_nv_memory_zero

@@
@@
 #include "priv.h"
+#include "gmpv/hooks.h"

@@
identifier imem, size, zero;
statement S;
@@
 nvkm_instobj_new(struct nvkm_instmem *imem, u32 size, ...)
 {
 <...
-	if (!imem->func->zero && zero)
+	if (!imem->func->zero && zero && !gmpv_nv_memory_zero(imem->subdev.device, memory, 0, size))
	S
 ...>
 }
