// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * Connects nouveau with gpu_mediator_pv.
 *
 * For nouveau, a page table of the device is a memory object like any other: its words are written one by one, and its
 * address is a handle. All code paths that write entries therefore write operations. The hooks in the hot paths only
 * reduce the number of operations.
 */

#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/version.h>

#include <core/device.h>
#include <core/memory.h>
#include <subdev/fb.h>
#include <subdev/mmu.h>

#include "nvkm/subdev/mmu/vmm.h"
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
#include "nvkm/engine/fifo/changf100.h"
#include "nvkm/engine/fifo/gf100.h"
#else
#include "nvkm/engine/fifo/cgrp.h"
#include "nvkm/engine/fifo/chan.h"
#include "nvkm/engine/fifo/chid.h"
#include "nvkm/engine/fifo/priv.h"
#include "nvkm/engine/fifo/runl.h"
#endif

#include "gmpv/hooks.h"
#include "gpu_mediator_pv.h"

/* Number of channels of the gf100 fifo, which is also the limit of a runlist. */
#define CHANNELS 128

/* A directory's page sizes, which follow from the tables' sizes, are 4 KiB and 128 KiB. */
#define BIG_PAGE 17

#define ENTRY_SHIFT 3

struct table_memory {
	struct nvkm_memory memory;
	struct gmpv_table *table;
	/* The low half of an entry. The next write contains the high half. */
	u32 low;
};

static struct table_memory *table_memory(struct nvkm_memory *memory)
{
	return container_of(memory, struct table_memory, memory);
}

static void *table_dtor(struct nvkm_memory *memory)
{
	gmpv_table_destroy(table_memory(memory)->table);
	return table_memory(memory);
}

static enum nvkm_memory_target table_target(struct nvkm_memory *memory)
{
	return NVKM_MEM_TARGET_VRAM;
}

static u8 table_page(struct nvkm_memory *memory)
{
	return 12;
}

static u64 table_bar2(struct nvkm_memory *memory)
{
	return ~0ULL;
}

static u64 table_addr(struct nvkm_memory *memory)
{
	return gmpv_table_address(table_memory(memory)->table);
}

static u64 table_size(struct nvkm_memory *memory)
{
	return gmpv_table_bytes(table_memory(memory)->table);
}

static void table_boot(struct nvkm_memory *memory, struct nvkm_vmm *vmm)
{
	/* The table can be written without a mapping, so it needs no early mapping. */
}

static void __iomem *table_acquire(struct nvkm_memory *memory)
{
	return NULL;
}

static void table_release(struct nvkm_memory *memory)
{
}

static int table_map(struct nvkm_memory *memory, u64 offset, struct nvkm_vmm *vmm, struct nvkm_vma *vma, void *argv,
		     u32 argc)
{
	return -EINVAL;
}

static const struct nvkm_memory_func table_func = {
	.dtor = table_dtor,
	.target = table_target,
	.page = table_page,
	.bar2 = table_bar2,
	.addr = table_addr,
	.size = table_size,
	.boot = table_boot,
	.acquire = table_acquire,
	.release = table_release,
	.map = table_map,
};

static u32 table_rd32(struct nvkm_memory *memory, u64 offset)
{
	u64 entry = gmpv_table_read(table_memory(memory)->table, offset >> ENTRY_SHIFT);

	return offset & 4 ? upper_32_bits(entry) : lower_32_bits(entry);
}

/* nouveau writes whole entries, low half first. */
static void table_wr32(struct nvkm_memory *memory, u64 offset, u32 data)
{
	struct table_memory *table = table_memory(memory);

	if (offset & 4)
		gmpv_table_write(table->table, offset >> ENTRY_SHIFT, (u64)data << 32 | table->low);
	else
		table->low = data;
}

static const struct nvkm_memory_ptrs table_ptrs = {
	.rd32 = table_rd32,
	.wr32 = table_wr32,
};

static struct gmpv_table *table_of(struct nvkm_memory *memory)
{
	return memory && memory->func == &table_func ? table_memory(memory)->table : NULL;
}

int gmpv_nv_device_init(struct nvkm_device *device)
{
	if (device->gmpv_known)
		return gmpv_resume(device->gmpv);
	device->gmpv_known = true;
	if (device->card_type == NV_C0 && device->pri && dev_is_pci(device->dev))
		device->gmpv = gmpv_attach(to_pci_dev(device->dev), device->pri);
	return 0;
}

void gmpv_nv_device_del(struct nvkm_device *device)
{
	gmpv_detach(device->gmpv);
	device->gmpv = NULL;
}

bool gmpv_nv_tables(struct nvkm_mmu *mmu)
{
	struct nvkm_device *device = mmu->subdev.device;

	return gmpv_has(device->gmpv, GMPV_FEATURE_TABLES) && device->fb->page == BIG_PAGE;
}

struct nvkm_mmu_pt *gmpv_nv_table_get(struct nvkm_mmu *mmu, u32 size)
{
	static const struct { u32 size, kind; } kinds[] = {
		{ 0x10000, GMPV_KIND_DIRECTORY }, { 0x40000, GMPV_KIND_SMALL }, { 0x2000, GMPV_KIND_LARGE },
	};
	struct table_memory *memory;
	struct nvkm_mmu_pt *pt;
	u32 i, kind = 0;

	for (i = 0; i < ARRAY_SIZE(kinds); i++) {
		if (kinds[i].size == size)
			kind = kinds[i].kind;
	}
	if (WARN_ON(!kind))
		return NULL;
	pt = kzalloc(sizeof(*pt), GFP_KERNEL);
	memory = kzalloc(sizeof(*memory), GFP_KERNEL);
	if (pt && memory) {
		memory->table = gmpv_table_create(mmu->subdev.device->gmpv, kind);
		if (!IS_ERR(memory->table)) {
			nvkm_memory_ctor(&table_func, &memory->memory);
			memory->memory.ptrs = &table_ptrs;
			pt->memory = &memory->memory;
			pt->addr = nvkm_memory_addr(pt->memory);
			return pt;
		}
	}
	kfree(memory);
	kfree(pt);
	return NULL;
}

bool gmpv_nv_table_put(struct nvkm_mmu_pt *pt)
{
	if (!pt || !table_of(pt->memory))
		return false;
	nvkm_memory_unref(&pt->memory);
	kfree(pt);
	return true;
}

bool gmpv_nv_entries_run(struct nvkm_mmu_pt *pt, u32 first, u32 count, u64 entry, u64 step)
{
	struct gmpv_table *table = table_of(pt->memory);

	if (table)
		gmpv_table_run(table, first, count, entry, step);
	return table;
}

bool gmpv_nv_entries_zero(struct nvkm_mmu_pt *pt, u32 first, u32 count)
{
	struct gmpv_table *table = table_of(pt->memory);

	if (table)
		gmpv_table_zero(table, first, count);
	return table;
}

static struct gmpv_table *directory_of(struct nvkm_vmm *vmm)
{
	return table_of(vmm->pd->pt[0]->memory);
}

bool gmpv_nv_flush(struct nvkm_vmm *vmm, bool all)
{
	struct gmpv_table *directory = directory_of(vmm);

	if (directory)
		gmpv_flush(vmm->mmu->subdev.device->gmpv, all ? NULL : directory);
	return directory;
}

int gmpv_nv_join(struct nvkm_vmm *vmm, struct nvkm_memory *inst)
{
	/* The block has no directory, because the table has no address in memory. */
	nvkm_kmap(inst);
	nvkm_wo64(inst, 0x0200, 0);
	nvkm_wo64(inst, 0x0208, vmm->limit - 1);
	nvkm_done(inst);
	return gmpv_instance_bind(vmm->mmu->subdev.device->gmpv, nvkm_memory_addr(inst), directory_of(vmm));
}

void gmpv_nv_part(struct nvkm_vmm *vmm, struct nvkm_memory *inst)
{
	gmpv_instance_bind(vmm->mmu->subdev.device->gmpv, nvkm_memory_addr(inst), NULL);
}

bool gmpv_nv_memory_zero(struct nvkm_device *device, struct nvkm_memory *memory, u64 offset, u64 size)
{
	return gmpv_has(device->gmpv, GMPV_FEATURE_MEMORY) && nvkm_memory_target(memory) == NVKM_MEM_TARGET_VRAM &&
	       !gmpv_memory_fill(device->gmpv, nvkm_memory_addr(memory) + offset, round_up(size, 4), 0);
}

static struct gmpv *channels(struct nvkm_device *device)
{
	return gmpv_has(device->gmpv, GMPV_FEATURE_CHANNELS) ? device->gmpv : NULL;
}

int gmpv_nv_channel_open(struct nvkm_device *device, u32 channel)
{
	struct gmpv *pv = channels(device);

	return pv ? gmpv_channel_open(pv, channel) : 0;
}

void gmpv_nv_channel_close(struct nvkm_device *device, u32 channel)
{
	struct gmpv *pv = channels(device);

	if (pv)
		gmpv_channel_close(pv, channel);
}

bool gmpv_nv_channel_bind(struct nvkm_device *device, u32 channel, u64 instance)
{
	struct gmpv *pv = channels(device);

	if (pv)
		gmpv_channel_bind(pv, channel, instance);
	return pv;
}

bool gmpv_nv_channel_unbind(struct nvkm_device *device, u32 channel)
{
	struct gmpv *pv = channels(device);

	if (pv)
		gmpv_channel_unbind(pv, channel);
	return pv;
}

static bool channel_switch(struct nvkm_device *device, u32 channel, u16 code)
{
	struct gmpv *pv = channels(device);

	if (!pv)
		return false;
	/* Linux 6.1 then writes the runlist, which can include this. Later versions may kick through a register. */
	if (LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0))
		gmpv_queue(pv, code, channel, NULL, 0);
	else
		gmpv_queue_run(pv, code, channel, NULL, 0);
	return true;
}

bool gmpv_nv_channel_enable(struct nvkm_device *device, u32 channel)
{
	return channel_switch(device, channel, GMPV_OP_CHANNEL_ENABLE);
}

bool gmpv_nv_channel_disable(struct nvkm_device *device, u32 channel)
{
	return channel_switch(device, channel, GMPV_OP_CHANNEL_DISABLE);
}

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
bool gmpv_nv_runlist_commit(struct gf100_fifo *fifo)
{
	struct gmpv *pv = channels(fifo->base.engine.subdev.device);
	struct gf100_fifo_chan *chan;
	u32 numbers[CHANNELS], count = 0;

	if (!pv)
		return false;
	mutex_lock(&fifo->base.mutex);
	list_for_each_entry(chan, &fifo->chan, head) {
		if (!WARN_ON(count == CHANNELS))
			numbers[count++] = chan->base.chid;
	}
	gmpv_runlist(pv, numbers, count);
	mutex_unlock(&fifo->base.mutex);
	return true;
}
#else
int gmpv_nv_runl_update(struct nvkm_runl *runl)
{
	struct gmpv *pv = channels(runl->fifo->engine.subdev.device);
	struct nvkm_cgrp *cgrp;
	struct nvkm_chan *chan;
	u32 numbers[CHANNELS], count = 0;

	if (!pv)
		return nv50_runl_update(runl);
	nvkm_runl_foreach_cgrp(cgrp, runl) {
		nvkm_cgrp_foreach_chan(chan, cgrp) {
			if (!WARN_ON(count == CHANNELS))
				numbers[count++] = chan->id;
		}
	}
	return gmpv_runlist(pv, numbers, count);
}

bool gmpv_nv_runl_ended(struct nvkm_runl *runl)
{
	/* The work had ended before the update returned. */
	return channels(runl->fifo->engine.subdev.device);
}
#endif
