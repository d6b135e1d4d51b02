// SPDX-License-Identifier: GPL-2.0-only OR MIT
// Runs of entries and clearing as one operation, the flush as the last operation of the open batch, and the address
// space of an instance block. Single writes need no hook: operations write a table's memory.
// file: nvkm/subdev/mmu/vmmgf100.c
// hook: gmpv_nv_entries_run
// hook: gmpv_nv_entries_zero
// hook: gmpv_nv_flush
// hook: gmpv_nv_join
// hook: gmpv_nv_part

@@
@@
 #include "vmm.h"
+#include "gmpv/hooks.h"

// Without compression tags entries differ only in the address.
@@
identifier vmm, pt, ptei, ptes, map, addr;
statement S, S1;
@@
 gf100_vmm_pgt_pte(struct nvkm_vmm *vmm, struct nvkm_mmu_pt *pt, u32 ptei, u32 ptes, struct nvkm_vmm_map *map, u64 addr)
 {
 ... when != S
+	if (!map->ctag && gmpv_nv_entries_run(pt, ptei, ptes, (addr >> 8) | map->type, map->next))
+		return;
 S1
 ... when any
 }

@@
identifier vmm, pt, ptei, ptes;
statement S, S1;
@@
 gf100_vmm_pgt_unmap(struct nvkm_vmm *vmm, struct nvkm_mmu_pt *pt, u32 ptei, u32 ptes)
 {
 ... when != S
+	if (gmpv_nv_entries_zero(pt, ptei, ptes))
+		return;
 S1
 ... when any
 }

// Bit 1 of the type: the page directories of all address spaces.
@@
identifier vmm, type;
statement S, S1;
@@
 gf100_vmm_invalidate(struct nvkm_vmm *vmm, u32 type)
 {
 ... when != S
+	if (gmpv_nv_flush(vmm, type & 2))
+		return;
 S1
 ... when any
 }

@@
identifier vmm, inst, base;
statement S, S1;
@@
 gf100_vmm_join_(struct nvkm_vmm *vmm, struct nvkm_memory *inst, u64 base)
 {
 ... when != S
+	if (gmpv_nv_tables(vmm->mmu))
+		return gmpv_nv_join(vmm, inst);
 S1
 ... when any
 }

@@
identifier vmm, inst;
statement S, S1;
@@
 gf100_vmm_part(struct nvkm_vmm *vmm, struct nvkm_memory *inst)
 {
 ... when != S
+	if (gmpv_nv_tables(vmm->mmu)) {
+		gmpv_nv_part(vmm, inst);
+		return;
+	}
 S1
 ... when any
 }
