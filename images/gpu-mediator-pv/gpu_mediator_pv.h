/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * What a GPU driver calls to let the mediator do, in one go, what would else be many trapped accesses.
 *
 * Operations are either put in a batch of the caller's own (gmpv_begin(), gmpv_append(), gmpv_run()), or queued: a queued
 * operation joins the device's open batch, which is handed over as a whole by the next operation that waits for its end
 * (those marked "runs"). All batches are dealt with in the order in which they are handed over, so that what is queued
 * first is done first.
 *
 * All functions but those marked "sleeps" may be called in atomic context. What waits polls: a few microseconds on the
 * ring, then by a register read that ends when the batch has.
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
 * Begins to use the interface of a device whose BAR0 is mapped at @bar0, which must stay until gmpv_detach(). NULL: the
 * device does not have one, or not of a version that is known. Sleeps.
 */
struct gmpv *gmpv_attach(struct pci_dev *pdev, void __iomem *bar0);
/* Gives it up, with all tables, channels and segments. NULL is fine. Sleeps. */
void gmpv_detach(struct gmpv *pv);
/* Sets the interface up again, tables and bindings included, if the device has lost them in a suspend. Sleeps. */
int gmpv_resume(struct gmpv *pv);
/* Whether all of @features (GMPV_FEATURE_*) are in use. NULL has none. */
bool gmpv_has(const struct gmpv *pv, u32 features);

/* A batch of the caller's own; an ERR_PTR when the device does not answer any more. */
struct gmpv_batch *gmpv_begin(struct gmpv *pv);
/* Appends an operation with a body of @bytes, a multiple of GMPV_UNIT. -ENOSPC: it does not fit; run the batch first. */
int gmpv_append(struct gmpv_batch *batch, u16 code, u32 handle, const void *body, size_t bytes);
/* Hands the batch over, waits for its end, and frees it. @value: the last operation's, if not NULL. */
int gmpv_run(struct gmpv_batch *batch, u64 *value);

/* Queues an operation. Where it fails, that is logged. */
void gmpv_queue(struct gmpv *pv, u16 code, u32 handle, const void *body, size_t bytes);
/* Queues an operation and runs: all that is queued, up to it. The result is that of this operation. */
int gmpv_queue_run(struct gmpv *pv, u16 code, u32 handle, const void *body, size_t bytes);

/*
 * Makes a page table of one of GMPV_KIND_*, with all entries empty. An ERR_PTR: -ENOSPC when the virtual machine has as
 * many as it may. Runs, sleeps.
 */
struct gmpv_table *gmpv_table_create(struct gmpv *pv, u32 kind);
/* Queues its end. Sleeps. */
void gmpv_table_destroy(struct gmpv_table *table);
/* Its size in bytes, as the hardware has it. */
u32 gmpv_table_bytes(const struct gmpv_table *table);
/*
 * What stands for its address where hardware would want one: in the entries of a directory, whose layout is the
 * hardware's. It is no address of anything.
 */
u64 gmpv_table_address(const struct gmpv_table *table);
/* Reads back an entry as it was written. */
u64 gmpv_table_read(const struct gmpv_table *table, u32 index);
/* Queues the writing of an entry, as the hardware has it. */
void gmpv_table_write(struct gmpv_table *table, u32 index, u64 entry);
/* Queues the writing of @count entries, each @step more than the one before. Not for directories. */
void gmpv_table_run(struct gmpv_table *table, u32 first, u32 count, u64 entry, u64 step);
/* Queues the emptying of @count entries. */
void gmpv_table_zero(struct gmpv_table *table, u32 first, u32 count);
/* As a flush of the TLB of an address space, or of all for NULL. Runs. */
int gmpv_flush(struct gmpv *pv, const struct gmpv_table *directory);
/* What address space the instance block at @instance (VRAM) has; NULL: what the block says. Runs, sleeps. */
int gmpv_instance_bind(struct gmpv *pv, u64 instance, struct gmpv_table *directory);

/* Sets a channel aside for the calling process. -ENOSPC when the virtual machine has as many as it may. Runs, sleeps. */
int gmpv_channel_open(struct gmpv *pv, u32 channel);
/* Queues the binding to an instance block in VRAM. Sleeps. */
void gmpv_channel_bind(struct gmpv *pv, u32 channel, u64 instance);
/* Ends what others have attached for the channel, and unbinds it. Runs, sleeps. */
void gmpv_channel_unbind(struct gmpv *pv, u32 channel);
/* The channel is nobody's any more. Runs, sleeps. */
void gmpv_channel_close(struct gmpv *pv, u32 channel);
/* Says which channels may run. -EINVAL: too many for a batch. Runs. */
int gmpv_runlist(struct gmpv *pv, const u32 *channels, u32 count);

/* Fills VRAM with a word. @address and @bytes are multiples of 4. Runs. */
int gmpv_memory_fill(struct gmpv *pv, u64 address, u64 bytes, u32 value);

#endif
