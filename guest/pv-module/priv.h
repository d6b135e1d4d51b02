/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Definitions that the parts of the module share. */
#ifndef GPU_MEDIATOR_PRIV_H
#define GPU_MEDIATOR_PRIV_H

#include <linux/atomic.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mutex.h>
#include <linux/pid.h>
#include <linux/spinlock.h>
#include <linux/xarray.h>
#include <uapi/linux/virtio_ring.h>

#include "gpu_mediator_pv.h"

/* Batches that can be in flight, including the open one. */
#define GMPV_SLOTS	8
/* A slot's chain is one readable and one writable descriptor. */
#define GMPV_QUEUE	(2 * GMPV_SLOTS)

/* A batch, from its beginning to its end. The device uses its memory from gmpv_publish() until @ended. */
struct gmpv_batch {
	struct gmpv *pv;
	unsigned int index;
	struct gmpv_batch_header *request;
	dma_addr_t request_dma;
	struct gmpv_answer_header *answer;
	dma_addr_t answer_dma;
	u32 ops, bytes;
	/* The last operation, while entries may still be added to it. */
	struct gmpv_op_header *tail;
	/* Guarded by gmpv.lock. */
	bool taken;
	bool ended;
	/* Set if the caller handles refusals, which are then not logged. */
	bool quiet;
};

struct gmpv_counters {
	atomic64_t calls, operations, entries, doorbells, polls, failures;
};

struct gmpv {
	struct kref kref;
	struct pci_dev *pdev;
	struct device *dev;
	void __iomem *regs;
	u32 features;
	bool dead;

	/* Protects slots and rings; held to publish and to collect, never during a wait. */
	spinlock_t lock;
	struct gmpv_batch batches[GMPV_SLOTS];
	struct gmpv_batch *open;
	void *ring;
	dma_addr_t ring_dma;
	struct vring vring;
	u16 next_avail, last_used;

	/* Tables by handle. The mutex keeps tables alive while they are walked. */
	struct mutex tables_lock;
	struct xarray tables;
	/* Directories by the page number of the instance block that they are bound to. */
	struct xarray bindings;

	/* Channels by number, segments by id, and the attachments of files. */
	struct mutex users_lock;
	struct xarray channels;
	struct xarray segments;
	struct list_head files;

	struct miscdevice misc;
	char misc_name[32];
	int number;
	struct dentry *debugfs;
	struct gmpv_counters counters;
};

/* A page table that the device keeps. */
struct gmpv_table {
	struct gmpv *pv;
	u32 handle;
	u32 kind;
	u32 count;
	/* The written entries: they are read back, walked, and written again after a suspend. */
	u64 *entries;
};

/* A channel of the guest. */
struct gmpv_channel {
	u32 number;
	/* The process that created the channel. */
	struct pid *owner;
	u64 instance;
	/* Set while the device knows the channel. */
	bool created;
};

extern bool gmpv_naive;
extern unsigned int gmpv_spin_us;

int gmpv_queue_init(struct gmpv *pv);
void gmpv_queue_free(struct gmpv *pv);
int gmpv_setup(struct gmpv *pv);
/* As gmpv_append(), with @reserve bytes for the whole operation and its later entries. */
void *gmpv_batch_add(struct gmpv_batch *batch, u16 code, u32 handle, const void *body, size_t bytes);
/* Calls @add under the lock with an open batch, and calls it again if it returns -ENOSPC. */
void gmpv_with_open(struct gmpv *pv, int (*add)(struct gmpv_batch *batch, void *data), void *data);

void gmpv_tables_free(struct gmpv *pv);
void gmpv_tables_restore(struct gmpv *pv);
void gmpv_channels_free(struct gmpv *pv);
void gmpv_channels_forget(struct gmpv *pv);
/* Returns the channel @number if the calling process may use it; the caller holds users_lock. */
struct gmpv_channel *gmpv_channel_of_caller(struct gmpv *pv, u32 number);

int gmpv_node_add(struct gmpv *pv);
void gmpv_node_remove(struct gmpv *pv);
/* Detaches all segments of a channel; the caller holds users_lock. */
void gmpv_node_channel_gone(struct gmpv *pv, u32 channel);
/* Sets the priority of the VRAM that a channel's addresses map. */
int gmpv_priority(struct gmpv *pv, struct gmpv_table *directory, u64 address, u64 bytes, s32 priority, u64 *reached);

void gmpv_get(struct gmpv *pv);
void gmpv_put(struct gmpv *pv);

#endif
