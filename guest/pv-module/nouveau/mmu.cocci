// SPDX-License-Identifier: GPL-2.0-only OR MIT
// Tables of the device instead of cleared memory. They are created empty, so that none is kept for another use.
// file: nvkm/subdev/mmu/base.c
// hook: gmpv_nv_table_get
// hook: gmpv_nv_table_put

@@
@@
 #include "vmm.h"
+#include "gmpv/hooks.h"

@@
identifier mmu, size, align, zero;
statement S, S1;
@@
 nvkm_mmu_ptc_get(struct nvkm_mmu *mmu, u32 size, u32 align, bool zero)
 {
 ... when != S
+	if (gmpv_nv_tables(mmu))
+		return gmpv_nv_table_get(mmu, size);
 S1
 ... when any
 }

@@
identifier mmu, force, ppt;
statement S, S1;
@@
 nvkm_mmu_ptc_put(struct nvkm_mmu *mmu, bool force, struct nvkm_mmu_pt **ppt)
 {
 ... when != S
+	if (gmpv_nv_table_put(*ppt))
+		return;
 S1
 ... when any
 }
