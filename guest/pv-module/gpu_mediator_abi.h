// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * What a guest's driver and gpu-mediator agree on. Made from pv/src/abi.rs by
 *   cargo run -p pv --example header
 * docs/design/paravirtual.md tells how it is used.
 */
#ifndef GPU_MEDIATOR_ABI_H
#define GPU_MEDIATOR_ABI_H

#include <linux/types.h>

/* Version of this interface. */
#define GMPV_VERSION_MAJOR 0x1
/* See GMPV_VERSION_MAJOR. */
#define GMPV_VERSION_MINOR 0x0
/* Id of a vendor-specific capability. */
#define GMPV_CAPABILITY_ID 0x9
/* Marks the capability as ours: "GMPV". */
#define GMPV_SIGNATURE 0x56504d47
/* Most entries of the queue. */
#define GMPV_MAX_QUEUE 0x100
/* Most bytes of a batch, its header included. */
#define GMPV_MAX_BATCH_BYTES 0x10000
/* Most operations of a batch. */
#define GMPV_MAX_BATCH_OPS 0x400
/* Operations are multiples of this, in bytes. */
#define GMPV_UNIT 0x8
/* Most bytes that one operation fills or copies. */
#define GMPV_MAX_MEMORY_BYTES 0x1000000ULL

/* Features of a device, one bit each. */

/* Page tables that the device keeps. */
#define GMPV_FEATURE_TABLES 0x1
/* Channels and the runlist. */
#define GMPV_FEATURE_CHANNELS 0x2
/* Filling and copying VRAM. */
#define GMPV_FEATURE_MEMORY 0x4
/* Importance of ranges of VRAM. */
#define GMPV_FEATURE_PRIORITY 0x8
/* Segments of device memory that several channels map. */
#define GMPV_FEATURE_SHARE 0x10
/* Segments that channels of other virtual machines map. */
#define GMPV_FEATURE_SHARE_ABROAD 0x20
/* Questions about the memory of the virtual machine and its limits. */
#define GMPV_FEATURE_QUERY 0x40
/* An interrupt when a batch has ended. */
#define GMPV_FEATURE_INTERRUPT 0x80

/* The device's registers: 32 bits each, at byte offsets from offset of struct gmpv_capability. */

/* Read: GMPV_SIGNATURE. */
#define GMPV_REGISTER_SIGNATURE 0x0
/* Read: features that are offered. */
#define GMPV_REGISTER_FEATURES 0x4
/* One of GMPV_STATUS_*. */
#define GMPV_REGISTER_STATUS 0x8
/* Entries of the queue: a power of two up to GMPV_MAX_QUEUE. */
#define GMPV_REGISTER_QUEUE_SIZE 0xc
/* Guest-physical address of the descriptor table, low and high half; a multiple of 16. */
#define GMPV_REGISTER_QUEUE_DESCRIPTORS 0x10
/* Guest-physical address of the available ring, low and high half; a multiple of 2. */
#define GMPV_REGISTER_QUEUE_AVAILABLE 0x18
/* Guest-physical address of the used ring, low and high half; a multiple of 4. */
#define GMPV_REGISTER_QUEUE_USED 0x20
/* Write, of any value: the available ring has new batches. */
#define GMPV_REGISTER_DOORBELL 0x28
/* Read: batches that have ended since the queue was set up, modulo 2^32. */
#define GMPV_REGISTER_ENDED 0x2c
/* Read: 1 while the device asks for an interrupt. */
#define GMPV_REGISTER_INTERRUPT 0x30
/*
 * 1: the device asks for an interrupt when batches have ended, unless the available ring's flags say
 * not to.
 */
#define GMPV_REGISTER_INTERRUPT_ENABLE 0x34
/* Bytes of the registers. */
#define GMPV_REGISTER_BYTES 0x40

/* Values of GMPV_REGISTER_STATUS. */

/* Nothing is set up. */
#define GMPV_STATUS_RESET 0x0
/* Written by the driver: features and queue are set up. */
#define GMPV_STATUS_READY 0x1
/* The queue cannot be used as it was set up, or can no longer be used. */
#define GMPV_STATUS_FAILED 0x80

/* Outcome of an operation. */

/* It is done. */
#define GMPV_RESULT_DONE 0x0
/* An operation before it failed. */
#define GMPV_RESULT_NOT_BEGUN 0x1
/* The batch cannot be read: sizes that do not fit, or a code that version 1 does not have. */
#define GMPV_RESULT_MALFORMED 0x2
/* Of a feature that was not offered, or not accepted. */
#define GMPV_RESULT_UNSUPPORTED 0x3
/* The table, segment or channel does not exist. */
#define GMPV_RESULT_NO_OBJECT 0x4
/* One of that name exists already. */
#define GMPV_RESULT_EXISTS 0x5
/* The object is of another type. */
#define GMPV_RESULT_WRONG_TYPE 0x6
/* An index, count, address or size that the object does not have. */
#define GMPV_RESULT_RANGE 0x7
/* A reserved bit or field is not 0, or a value means nothing. */
#define GMPV_RESULT_INVALID 0x8
/* A limit of the virtual machine, or of the card. */
#define GMPV_RESULT_LIMIT 0x9
/* The owner of the segment, or the operator, has not allowed it. */
#define GMPV_RESULT_DENIED 0xa
/* The card did not do it. */
#define GMPV_RESULT_FAILED 0xb

/* Types of page tables. */

/* A page directory: 8192 entries, each with a small-page table and a large-page table. */
#define GMPV_KIND_DIRECTORY 0x1
/* A table of 32768 pages of 4 KiB. */
#define GMPV_KIND_SMALL 0x2
/* A table of 1024 pages of 128 KiB. */
#define GMPV_KIND_LARGE 0x3

/* Codes of operations, and the bodies after their headers. */

/* Makes a table. */
#define GMPV_OP_TABLE_CREATE 0x1
/* The guest no longer uses the table: its handle is free. */
#define GMPV_OP_TABLE_DESTROY 0x2
/* Sets an entry of the directory `handle`. */
#define GMPV_OP_DIRECTORY_SET 0x3
/* Writes consecutive entries of the table `handle`, whose values increase by a fixed step. */
#define GMPV_OP_ENTRIES_RUN 0x4
/* Writes entries of the table `handle` from a list. */
#define GMPV_OP_ENTRIES_LIST 0x5
/* Empties entries of the table `handle`. */
#define GMPV_OP_ENTRIES_ZERO 0x6
/*
 * Binds the address space of an instance block (of a channel, or of an aperture) to the directory
 * `handle`, whatever the block says; with handle 0, to the block's own again.
 */
#define GMPV_OP_DIRECTORY_BIND 0x7
/* As a flush of the TLB: memory that was unmapped before cannot be reached when it is done. */
#define GMPV_OP_FLUSH 0x8
/*
 * Sets the channel `handle` aside: GMPV_RESULT_LIMIT when the virtual machine has as many as it may.
 */
#define GMPV_OP_CHANNEL_CREATE 0x10
/* Binds the channel `handle` to its instance block. */
#define GMPV_OP_CHANNEL_BIND 0x11
/* Lets the channel `handle` run when it is in the runlist. */
#define GMPV_OP_CHANNEL_ENABLE 0x12
/* Keeps the channel `handle` from running. */
#define GMPV_OP_CHANNEL_DISABLE 0x13
/* Unbinds the channel `handle`. */
#define GMPV_OP_CHANNEL_DESTROY 0x14
/* Says which channels may run. */
#define GMPV_OP_RUNLIST 0x15
/* Fills guest VRAM with a word. */
#define GMPV_OP_MEMORY_FILL 0x20
/* Copies guest VRAM; the two ranges do not overlap. */
#define GMPV_OP_MEMORY_COPY 0x21
/*
 * Sets how important it is that a range of guest VRAM is on the card; chunks of the lowest priority
 * leave first.
 */
#define GMPV_OP_BUFFER_PRIORITY 0x22
/* Finds or makes a segment by its key; the answer's value is its id. */
#define GMPV_OP_SHARE_GET 0x30
/* Maps the segment `handle` for a channel; the answer's value is its GPU virtual address there. */
#define GMPV_OP_SHARE_ATTACH 0x31
/* Unmaps the segment `handle` for a channel; work that still uses it faults. */
#define GMPV_OP_SHARE_DETACH 0x32
/* Asks about the segment `handle`, or changes it. */
#define GMPV_OP_SHARE_CONTROL 0x33
/* Asks one of GMPV_QUERY_*, which is the handle; the answer's value is the number. */
#define GMPV_OP_QUERY 0x40

/* Shared segments. */

/* Make the segment if none has that key. */
#define GMPV_SHARE_CREATE 0x1
/* With GMPV_SHARE_CREATE: only if none has that key. */
#define GMPV_SHARE_EXCLUSIVE 0x2
/*
 * Find or make a segment of the group that the operator has put the virtual machine into, not of
 * itself alone.
 */
#define GMPV_SHARE_ABROAD 0x4
/* Attach for reading only. */
#define GMPV_SHARE_READ_ONLY 0x8

/* Rights of other virtual machines than the one that has made the segment. */

/* They may attach it for reading. */
#define GMPV_SHARE_MODE_READ 0x1
/* They may attach it for writing. */
#define GMPV_SHARE_MODE_WRITE 0x2

/* Commands of GMPV_OP_SHARE_CONTROL. */

/* The answer's value: the segment's size in bytes. */
#define GMPV_SHARE_CONTROL_SIZE 0x1
/* The answer's value: address spaces that it is attached to, of all virtual machines. */
#define GMPV_SHARE_CONTROL_ATTACHED 0x2
/* The answer's value: its GMPV_SHARE_MODE_*. */
#define GMPV_SHARE_CONTROL_MODE 0x3
/* Sets its mode. */
#define GMPV_SHARE_CONTROL_SET_MODE 0x4
/* Removes the key; the segment goes when nothing has it attached. */
#define GMPV_SHARE_CONTROL_REMOVE 0x5

/* Questions of GMPV_OP_QUERY. */

/* VRAM that the vGPU shows. */
#define GMPV_QUERY_VRAM 0x1
/* Bytes of it that may be on the card; all ones without a limit. */
#define GMPV_QUERY_QUOTA 0x2
/* Bytes of it that are guaranteed. */
#define GMPV_QUERY_GUARANTEE 0x3
/* Bytes of it that are on the card now. */
#define GMPV_QUERY_PLACED 0x4
/* Bytes of it that are in host memory now. */
#define GMPV_QUERY_HOST 0x5
/* Bytes of it that would be on the card if all took their entitlements. */
#define GMPV_QUERY_ENTITLEMENT 0x6
/* Bytes that are free on the card. */
#define GMPV_QUERY_FREE 0x7
/*
 * Shortage of the card's memory: 0 none, 1 some virtual machine's memory is in host memory, 2 this
 * one's is.
 */
#define GMPV_QUERY_PRESSURE 0x8
/* The part of the card's time that it is entitled to, in millionths. */
#define GMPV_QUERY_TIME_SHARE 0x9
/* Bytes of page tables that it may still make. */
#define GMPV_QUERY_TABLE_BYTES_LEFT 0xa

/* The PCI capability. */
struct gmpv_capability {
	/* GMPV_CAPABILITY_ID. */
	__u8 id;
	/* Offset of the next capability. */
	__u8 next;
	/* Bytes of this one. */
	__u8 length;
	/* BAR that the registers are in. */
	__u8 bar;
	/* GMPV_SIGNATURE. */
	__le32 signature;
	/* GMPV_VERSION_MAJOR. */
	__u8 version_major;
	/* GMPV_VERSION_MINOR. */
	__u8 version_minor;
	/* 0. */
	__le16 reserved;
	/* Byte offset of the registers in the BAR. */
	__le32 offset;
	/* Features of the device: GMPV_FEATURE_*. */
	__le32 features;
};
_Static_assert(sizeof(struct gmpv_capability) == 20, "struct gmpv_capability");

/* Begins a batch. */
struct gmpv_batch_header {
	/* Operations that follow; at least 1, at most GMPV_MAX_BATCH_OPS. */
	__le32 ops;
	/* Bytes of the operations; bytes after them are ignored. */
	__le32 bytes;
};
_Static_assert(sizeof(struct gmpv_batch_header) == 8, "struct gmpv_batch_header");

/* Begins an operation. */
struct gmpv_op_header {
	/* Code of the operation: GMPV_OP_*. */
	__le16 code;
	/* Size of the operation, this header included, in units of GMPV_UNIT bytes. */
	__le16 units;
	/* Handle of the object; 0 where the operation is not done to anything. */
	__le32 handle;
};
_Static_assert(sizeof(struct gmpv_op_header) == 8, "struct gmpv_op_header");

/* Begins the answer to a batch. */
struct gmpv_answer_header {
	/*
	 * GMPV_RESULT_DONE when all operations are done; GMPV_RESULT_MALFORMED when none was begun, for the
	 * batch cannot be read; else the status of the operation that was not done.
	 */
	__le32 status;
	/* Operations that are done: all before the one that failed. */
	__le32 done;
};
_Static_assert(sizeof(struct gmpv_answer_header) == 8, "struct gmpv_answer_header");

/* The answer to an operation. */
struct gmpv_answer {
	/* One of GMPV_RESULT_*. */
	__le32 status;
	/* 0. */
	__le32 reserved;
	/* Answer to a question, if one was asked. */
	__le64 value;
};
_Static_assert(sizeof(struct gmpv_answer) == 16, "struct gmpv_answer");

/* Of GMPV_OP_TABLE_CREATE. */
struct gmpv_table_create {
	/* One of GMPV_KIND_*. */
	__le32 kind;
	/* 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_table_create) == 8, "struct gmpv_table_create");

/* Of GMPV_OP_DIRECTORY_SET. */
struct gmpv_directory_set {
	/* Of the entry. */
	__le32 index;
	/* Handle of the small-page table, or 0 for none. */
	__le32 small;
	/* Handle of the large-page table, or 0 for none. */
	__le32 large;
	/* 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_directory_set) == 16, "struct gmpv_directory_set");

/* Of GMPV_OP_ENTRIES_RUN. */
struct gmpv_entries_run {
	/* Index of the first entry. */
	__le32 first;
	/* Entries. */
	__le32 count;
	/* The first entry, as the hardware has it, with the guest's addresses. */
	__le64 entry;
	/* Difference of each entry from the one before. */
	__le64 step;
};
_Static_assert(sizeof(struct gmpv_entries_run) == 24, "struct gmpv_entries_run");

/* Of GMPV_OP_ENTRIES_LIST (the entries follow) and GMPV_OP_ENTRIES_ZERO. */
struct gmpv_entries {
	/* Index of the first entry. */
	__le32 first;
	/* Entries. */
	__le32 count;
};
_Static_assert(sizeof(struct gmpv_entries) == 8, "struct gmpv_entries");

/* Of GMPV_OP_DIRECTORY_BIND and GMPV_OP_CHANNEL_BIND. */
struct gmpv_instance {
	/* Guest VRAM address of an instance block; a multiple of 4 KiB. */
	__le64 instance;
};
_Static_assert(sizeof(struct gmpv_instance) == 8, "struct gmpv_instance");

/*
 * Of GMPV_OP_RUNLIST; the channels' numbers follow, 32 bits each, and 32 bits of 0 after an odd
 * count.
 */
struct gmpv_runlist {
	/* Channels. */
	__le32 count;
	/* 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_runlist) == 8, "struct gmpv_runlist");

/* Of GMPV_OP_MEMORY_FILL. */
struct gmpv_memory_fill {
	/* Guest VRAM address; a multiple of 4. */
	__le64 address;
	/* A multiple of 4, at most GMPV_MAX_MEMORY_BYTES. */
	__le64 bytes;
	/* The word. */
	__le32 value;
	/* 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_memory_fill) == 24, "struct gmpv_memory_fill");

/* Of GMPV_OP_MEMORY_COPY. */
struct gmpv_memory_copy {
	/* Guest VRAM address; a multiple of 4. */
	__le64 to;
	/* Guest VRAM address; a multiple of 4. */
	__le64 from;
	/* A multiple of 4, at most GMPV_MAX_MEMORY_BYTES. */
	__le64 bytes;
};
_Static_assert(sizeof(struct gmpv_memory_copy) == 24, "struct gmpv_memory_copy");

/* Of GMPV_OP_BUFFER_PRIORITY. */
struct gmpv_buffer_priority {
	/* Guest VRAM address. */
	__le64 address;
	/* Number of bytes. */
	__le64 bytes;
	/* 0 is the priority of all memory at first; higher stays longer. */
	__le32 priority;
	/* 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_buffer_priority) == 24, "struct gmpv_buffer_priority");

/* Of GMPV_OP_SHARE_GET. */
struct gmpv_share_get {
	/* The name that the users agree on; 0 for a segment that no other machine finds by a key. */
	__le64 key;
	/* Size; rounded up to 4 KiB. */
	__le64 bytes;
	/* Of GMPV_SHARE_*. */
	__le32 flags;
	/* Rights: GMPV_SHARE_MODE_*. */
	__le32 mode;
};
_Static_assert(sizeof(struct gmpv_share_get) == 24, "struct gmpv_share_get");

/* Of GMPV_OP_SHARE_ATTACH and GMPV_OP_SHARE_DETACH. */
struct gmpv_share_attach {
	/* The channel in whose address space it is mapped. */
	__le32 channel;
	/* Of GMPV_SHARE_*; 0 to detach. */
	__le32 flags;
};
_Static_assert(sizeof(struct gmpv_share_attach) == 8, "struct gmpv_share_attach");

/* Of GMPV_OP_SHARE_CONTROL. */
struct gmpv_share_control {
	/* One of GMPV_SHARE_CONTROL_*. */
	__le32 command;
	/* New value; 0 for questions. */
	__le32 argument;
};
_Static_assert(sizeof(struct gmpv_share_control) == 8, "struct gmpv_share_control");

#endif
