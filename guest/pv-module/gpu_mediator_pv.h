/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Calls of a GPU driver that let the mediator do at once the work of many trapped accesses.
 *
 * Operations are either put in the caller's own batch (gmpv_begin(), gmpv_append(), gmpv_run()), or queued: a queued
 * operation joins the device's open batch, which the next operation that waits for its end (those marked "runs")
 * submits as a whole. All batches are processed in the order of submission, so that operations are done in the order
 * in which they are queued.
 *
 * All functions except those marked "sleeps" may be called in atomic context. A waiting function polls: a few
 * microseconds on the ring, then with a register read that ends when the batch has.
 */
#ifndef GPU_MEDIATOR_PV_H
#define GPU_MEDIATOR_PV_H

#include <linux/pci.h>
#include <linux/types.h>

#include "gpu_mediator_abi.h"

struct gmpv;
struct gmpv_batch;
struct gmpv_table;

/*
 * Begins to use the interface of a device whose BAR0 is mapped at @bar0, which must stay until gmpv_detach(). NULL:
 * the device has none, or one of an unknown version. Sleeps.
 */
struct gmpv *gmpv_attach(struct pci_dev *pdev, void __iomem *bar0);
/* Ends the use of the interface, with all tables, channels and segments. NULL is fine. Sleeps. */
void gmpv_detach(struct gmpv *pv);
/* Sets the interface up again, tables and bindings included, if the device has lost them in a suspend. Sleeps. */
int gmpv_resume(struct gmpv *pv);
/* Returns true if all of @features (GMPV_FEATURE_*) are in use. For NULL, returns false. */
bool gmpv_has(const struct gmpv *pv, u32 features);

/* Starts a batch of the caller; an ERR_PTR if the device no longer answers. */
struct gmpv_batch *gmpv_begin(struct gmpv *pv);
/* Appends an operation with a body of @bytes, a multiple of GMPV_UNIT. -ENOSPC: it does not fit; run the batch
 * first. */
int gmpv_append(struct gmpv_batch *batch, u16 code, u32 handle, const void *body, size_t bytes);
/* Submits the batch, waits for its end, and frees it. @value: the last operation's, if not NULL. */
int gmpv_run(struct gmpv_batch *batch, u64 *value);

/* Queues an operation. A failure is logged. */
void gmpv_queue(struct gmpv *pv, u16 code, u32 handle, const void *body, size_t bytes);
/* Queues an operation and runs all queued ones up to it. The result is that of this operation. */
int gmpv_queue_run(struct gmpv *pv, u16 code, u32 handle, const void *body, size_t bytes);

/*
 * Makes a page table of one of GMPV_KIND_*, with all entries empty. An ERR_PTR: -ENOSPC at the virtual machine's
 * limit. Runs, sleeps.
 */
struct gmpv_table *gmpv_table_create(struct gmpv *pv, u32 kind);
/* Queues the destruction of a table. Sleeps. */
void gmpv_table_destroy(struct gmpv_table *table);
/* Returns the size of a table in bytes, as in hardware. */
u32 gmpv_table_bytes(const struct gmpv_table *table);
/*
 * A value to use in place of its address in the entries of a directory, whose layout is the hardware's. It is not an
 * address of memory.
 */
u64 gmpv_table_address(const struct gmpv_table *table);
/* Returns an entry as it was written. */
u64 gmpv_table_read(const struct gmpv_table *table, u32 index);
/* Queues the write of an entry in the hardware's layout. */
void gmpv_table_write(struct gmpv_table *table, u32 index, u64 entry);
/* Queues the write of @count entries, each @step more than the previous one. Does not apply to directories. */
void gmpv_table_run(struct gmpv_table *table, u32 first, u32 count, u64 entry, u64 step);
/* Queues the clearing of @count entries. */
void gmpv_table_zero(struct gmpv_table *table, u32 first, u32 count);
/* Flushes the TLB of an address space, or of all address spaces for NULL. Runs. */
int gmpv_flush(struct gmpv *pv, const struct gmpv_table *directory);
/* Sets the address space of the instance block at @instance (VRAM); NULL: the block's own. Runs, sleeps. */
int gmpv_instance_bind(struct gmpv *pv, u64 instance, struct gmpv_table *directory);

/* Reserves a channel for the calling process. -ENOSPC at the virtual machine's limit. Runs, sleeps. */
int gmpv_channel_open(struct gmpv *pv, u32 channel);
/* Queues the binding to an instance block in VRAM. Sleeps. */
void gmpv_channel_bind(struct gmpv *pv, u32 channel, u64 instance);
/* Detaches all segments of the channel, and unbinds it. Runs, sleeps. */
void gmpv_channel_unbind(struct gmpv *pv, u32 channel);
/* Releases the channel. Runs, sleeps. */
void gmpv_channel_close(struct gmpv *pv, u32 channel);
/* Sets the channels that may run. -EINVAL: too many for a batch. Runs. */
int gmpv_runlist(struct gmpv *pv, const u32 *channels, u32 count);

/* Fills VRAM with a word. @address and @bytes are multiples of 4. Runs. */
int gmpv_memory_fill(struct gmpv *pv, u64 address, u64 bytes, u32 value);

#endif
