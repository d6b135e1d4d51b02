/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/* Definitions shared by the parts of the module. */
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

/* Maximum number of batches in flight, including the open batch. */
#define GMPV_SLOTS	8
/* A slot's chain consists of a readable and a writable descriptor. */
#define GMPV_QUEUE	(2 * GMPV_SLOTS)

/* A batch, from its beginning to its end. The device uses its memory from the submission until @ended is set. */
struct gmpv_batch {
	struct gmpv *pv;
	unsigned int index;
	struct gmpv_batch_header *request;
	dma_addr_t request_dma;
	struct gmpv_answer_header *answer;
	dma_addr_t answer_dma;
	u32 ops, bytes;
	/* The last operation, if entries may still be added to it. */
	struct gmpv_op_header *tail;
	/* Protected by gmpv.lock. */
	bool taken;
	bool ended;
	/* Set if the caller handles rejections, which are then not logged. */
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

	/* Protects slots and rings. Held while batches are submitted and collected, but never during a wait. */
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
	/* Directories by the page number of the instance block to which they are bound. */
	struct xarray bindings;

	/* Channels by number, segments by ID, and the attachments of files. */
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

/* A page table maintained by the device. */
struct gmpv_table {
	struct gmpv *pv;
	u32 handle;
	u32 kind;
	u32 count;
	/* The written entries, for reading them back, for walks, and for writing them again after a suspend. */
	u64 *entries;
};

/* A channel of the guest. */
struct gmpv_channel {
	u32 number;
	/* The process that created the channel. */
	struct pid *owner;
	u64 instance;
	/* Set while the channel exists in the device. */
	bool created;
};

extern bool gmpv_naive;
extern unsigned int gmpv_spin_us;

int gmpv_queue_init(struct gmpv *pv);
void gmpv_queue_free(struct gmpv *pv);
int gmpv_setup(struct gmpv *pv);
/* Appends an operation like gmpv_append(). Returns the operation's body, or NULL if the operation does not fit. */
void *gmpv_batch_add(struct gmpv_batch *batch, u16 code, u32 handle, const void *body, size_t bytes);
/* Calls @add with an open batch while holding the lock, and calls it again if it returns -ENOSPC. */
void gmpv_with_open(struct gmpv *pv, int (*add)(struct gmpv_batch *batch, void *data), void *data);

void gmpv_tables_free(struct gmpv *pv);
void gmpv_tables_restore(struct gmpv *pv);
void gmpv_channels_free(struct gmpv *pv);
void gmpv_channels_forget(struct gmpv *pv);
/* Returns the channel @number if the calling process may use it. The caller must hold users_lock. */
struct gmpv_channel *gmpv_channel_of_caller(struct gmpv *pv, u32 number);

int gmpv_node_add(struct gmpv *pv);
void gmpv_node_remove(struct gmpv *pv);
/* Detaches all segments of a channel. The caller must hold users_lock. */
void gmpv_node_channel_gone(struct gmpv *pv, u32 channel);
/* Sets the priority of the VRAM that is mapped in a range of a channel's addresses. */
int gmpv_priority(struct gmpv *pv, struct gmpv_table *directory, u64 address, u64 bytes, s32 priority, u64 *reached);

void gmpv_get(struct gmpv *pv);
void gmpv_put(struct gmpv *pv);

#endif
