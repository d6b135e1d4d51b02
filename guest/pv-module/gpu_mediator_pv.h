/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * Calls for a GPU driver that replace many trapped accesses with a single one.
 *
 * Operations are either added to the caller's own batch (gmpv_begin(), gmpv_append(), gmpv_run()) or queued. A queued
 * operation is added to the device's open batch. This batch is submitted by the next operation that waits for its end
 * (those marked "runs"). All batches are processed in the order of submission, so operations are executed in the order
 * in which they are queued.
 *
 * All functions except for those marked "sleeps" may be called in atomic context. A waiting function first polls the
 * ring for a few microseconds, and then reads a register, which returns when the batch has ended.
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
 * Begins to use the interface of a device with a BAR0 that is mapped at @bar0 until gmpv_detach(). Returns NULL if the
 * device has no interface, or an interface of an unknown version. Sleeps.
 */
struct gmpv *gmpv_attach(struct pci_dev *pdev, void __iomem *bar0);
/* Ends the use of the interface, and of all tables, channels and segments. @pv may be NULL. Sleeps. */
void gmpv_detach(struct gmpv *pv);
/* Sets up the interface again, including tables and bindings, if the device has lost them in a suspend. Sleeps. */
int gmpv_resume(struct gmpv *pv);
/* Returns true if all of @features (GMPV_FEATURE_*) are in use. Returns false if @pv is NULL. */
bool gmpv_has(const struct gmpv *pv, u32 features);

/* Starts a batch for the caller. Returns an ERR_PTR if the device no longer responds. */
struct gmpv_batch *gmpv_begin(struct gmpv *pv);
/* Appends an operation with a body of @bytes, which must be a multiple of GMPV_UNIT. Returns -ENOSPC if it does not
 * fit. The batch must then be run first. */
int gmpv_append(struct gmpv_batch *batch, u16 code, u32 handle, const void *body, size_t bytes);
/* Submits the batch, waits for its end, and frees it. Stores the value of the last operation in @value if not NULL. */
int gmpv_run(struct gmpv_batch *batch, u64 *value);

/* Queues an operation. Failures are logged. */
void gmpv_queue(struct gmpv *pv, u16 code, u32 handle, const void *body, size_t bytes);
/* Queues an operation, and runs all operations queued so far. The result is that of this operation. */
int gmpv_queue_run(struct gmpv *pv, u16 code, u32 handle, const void *body, size_t bytes);

/*
 * Creates a page table of a type from GMPV_KIND_*, with empty entries. Returns an ERR_PTR on failure, with -ENOSPC at
 * the virtual machine's limit. Runs, sleeps.
 */
struct gmpv_table *gmpv_table_create(struct gmpv *pv, u32 kind);
/* Queues the destruction of a table. Sleeps. */
void gmpv_table_destroy(struct gmpv_table *table);
/* Returns the size of a table in bytes, which is the same as in hardware. */
u32 gmpv_table_bytes(const struct gmpv_table *table);
/*
 * Returns a value to use instead of the table's address in directory entries, which have the hardware's layout. The
 * value is not a memory address.
 */
u64 gmpv_table_address(const struct gmpv_table *table);
/* Returns an entry as written. */
u64 gmpv_table_read(const struct gmpv_table *table, u32 index);
/* Queues the write of an entry in the hardware's layout. */
void gmpv_table_write(struct gmpv_table *table, u32 index, u64 entry);
/* Queues the write of @count entries, each greater than the previous one by @step. Not for directories. */
void gmpv_table_run(struct gmpv_table *table, u32 first, u32 count, u64 entry, u64 step);
/* Queues the clearing of @count entries. */
void gmpv_table_zero(struct gmpv_table *table, u32 first, u32 count);
/* Flushes the TLB of an address space, or of all address spaces if @directory is NULL. Runs. */
int gmpv_flush(struct gmpv *pv, const struct gmpv_table *directory);
/* Sets the address space of the instance block at @instance (VRAM), or the block's own for NULL. Runs, sleeps. */
int gmpv_instance_bind(struct gmpv *pv, u64 instance, struct gmpv_table *directory);

/* Reserves a channel for the calling process. Returns -ENOSPC at the virtual machine's limit. Runs, sleeps. */
int gmpv_channel_open(struct gmpv *pv, u32 channel);
/* Queues the binding of a channel to an instance block in VRAM. Sleeps. */
void gmpv_channel_bind(struct gmpv *pv, u32 channel, u64 instance);
/* Detaches all segments of the channel, and unbinds the channel. Runs, sleeps. */
void gmpv_channel_unbind(struct gmpv *pv, u32 channel);
/* Releases the channel. Runs, sleeps. */
void gmpv_channel_close(struct gmpv *pv, u32 channel);
/* Sets the channels that may run. Returns -EINVAL if there are too many for a batch. Runs. */
int gmpv_runlist(struct gmpv *pv, const u32 *channels, u32 count);

/* Fills VRAM with a word. @address and @bytes must be multiples of 4. Runs. */
int gmpv_memory_fill(struct gmpv *pv, u64 address, u64 bytes, u32 value);

#endif
