/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Functions called by the hooks in nouveau. Each one returns true if it has performed the driver's next step. Without
 * the paravirtual interface, none of them returns true, and the driver works as it does without hooks.
 */
#ifndef GMPV_NOUVEAU_HOOKS_H
#define GMPV_NOUVEAU_HOOKS_H

#include <linux/types.h>

struct gf100_fifo;
struct nvkm_chan;
struct nvkm_device;
struct nvkm_memory;
struct nvkm_mmu;
struct nvkm_mmu_pt;
struct nvkm_runl;
struct nvkm_vmm;

/* Hooks for initializing a device, for the first time or after a suspend, and for unmapping its BAR0. */
int gmpv_nv_device_init(struct nvkm_device *device);
void gmpv_nv_device_del(struct nvkm_device *device);

/* Page tables. */
bool gmpv_nv_tables(struct nvkm_mmu *mmu);
struct nvkm_mmu_pt *gmpv_nv_table_get(struct nvkm_mmu *mmu, u32 size);
bool gmpv_nv_table_put(struct nvkm_mmu_pt *pt);
bool gmpv_nv_entries_run(struct nvkm_mmu_pt *pt, u32 first, u32 count, u64 entry, u64 step);
bool gmpv_nv_entries_zero(struct nvkm_mmu_pt *pt, u32 first, u32 count);
bool gmpv_nv_flush(struct nvkm_vmm *vmm, bool all);
int gmpv_nv_join(struct nvkm_vmm *vmm, struct nvkm_memory *inst);
void gmpv_nv_part(struct nvkm_vmm *vmm, struct nvkm_memory *inst);

/* Memory. */
bool gmpv_nv_memory_zero(struct nvkm_device *device, struct nvkm_memory *memory, u64 offset, u64 size);

/* Channels. */
int gmpv_nv_channel_open(struct nvkm_device *device, u32 channel);
void gmpv_nv_channel_close(struct nvkm_device *device, u32 channel);
bool gmpv_nv_channel_bind(struct nvkm_device *device, u32 channel, u64 instance);
bool gmpv_nv_channel_unbind(struct nvkm_device *device, u32 channel);
bool gmpv_nv_channel_enable(struct nvkm_device *device, u32 channel);
bool gmpv_nv_channel_disable(struct nvkm_device *device, u32 channel);

/* The runlist: functions for Linux 6.1 and for Linux 6.12. */
bool gmpv_nv_runlist_commit(struct gf100_fifo *fifo);
int gmpv_nv_runl_update(struct nvkm_runl *runl);
bool gmpv_nv_runl_ended(struct nvkm_runl *runl);

#endif
