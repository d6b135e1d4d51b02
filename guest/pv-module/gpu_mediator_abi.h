// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * Interface between a guest driver and gpu-mediator. Generated from pv/src/abi.rs by
 *   cargo run -p pv --example header
  * docs/design/paravirtual.md describes its use.
 */
#ifndef GPU_MEDIATOR_ABI_H
#define GPU_MEDIATOR_ABI_H

#include <linux/types.h>

/* Version of the interface. */
#define GMPV_VERSION_MAJOR 0x1
/* See GMPV_VERSION_MAJOR. */
#define GMPV_VERSION_MINOR 0x0
/* ID of a vendor-specific capability. */
#define GMPV_CAPABILITY_ID 0x9
/* Signature of the mediator's capability: "GMPV". */
#define GMPV_SIGNATURE 0x56504d47
/* Maximum number of queue entries. */
#define GMPV_MAX_QUEUE 0x100
/* Maximum size of a batch in bytes, including its header. */
#define GMPV_MAX_BATCH_BYTES 0x10000
/* Maximum number of operations in a batch. */
#define GMPV_MAX_BATCH_OPS 0x400
/* Unit of operation sizes in bytes. */
#define GMPV_UNIT 0x8
/* Maximum number of bytes that an operation can fill or copy. */
#define GMPV_MAX_MEMORY_BYTES 0x1000000ULL

/* Features of a device, as a bit mask. */

/* Page tables maintained by the device. */
#define GMPV_FEATURE_TABLES 0x1
/* Channels and the runlist. */
#define GMPV_FEATURE_CHANNELS 0x2
/* Filling and copying of VRAM. */
#define GMPV_FEATURE_MEMORY 0x4
/* Eviction priorities of VRAM ranges. */
#define GMPV_FEATURE_PRIORITY 0x8
/* Segments of device memory that several channels can map. */
#define GMPV_FEATURE_SHARE 0x10
/* Segments that channels of other virtual machines can map. */
#define GMPV_FEATURE_SHARE_ABROAD 0x20
/* Queries of the virtual machine's memory and limits. */
#define GMPV_FEATURE_QUERY 0x40
/* Interrupts on completion of batches. */
#define GMPV_FEATURE_INTERRUPT 0x80

/*
 * The device's 32-bit registers, at byte offsets relative to the offset in struct gmpv_capability.
 */

/* Read: GMPV_SIGNATURE. */
#define GMPV_REGISTER_SIGNATURE 0x0
/* Read: features offered by the device. */
#define GMPV_REGISTER_FEATURES 0x4
/* Status: a value of GMPV_STATUS_*. */
#define GMPV_REGISTER_STATUS 0x8
/* Number of queue entries, a power of two of at most GMPV_MAX_QUEUE. */
#define GMPV_REGISTER_QUEUE_SIZE 0xc
/* Guest-physical address of the descriptor table (low and high half), a multiple of 16. */
#define GMPV_REGISTER_QUEUE_DESCRIPTORS 0x10
/* Guest-physical address of the available ring (low and high half), a multiple of 2. */
#define GMPV_REGISTER_QUEUE_AVAILABLE 0x18
/* Guest-physical address of the used ring (low and high half), a multiple of 4. */
#define GMPV_REGISTER_QUEUE_USED 0x20
/* Write (any value): notifies the device of new batches in the available ring. */
#define GMPV_REGISTER_DOORBELL 0x28
/* Read: number of batches completed since the queue was set up, modulo 2^32. */
#define GMPV_REGISTER_ENDED 0x2c
/* Read: 1 while the device asserts its interrupt. */
#define GMPV_REGISTER_INTERRUPT 0x30
/*
 * Value 1: the device asserts its interrupt on completion of batches, unless the flags of the
 * available ring suppress it.
 */
#define GMPV_REGISTER_INTERRUPT_ENABLE 0x34
/* Size of the registers in bytes. */
#define GMPV_REGISTER_BYTES 0x40

/* Values of GMPV_REGISTER_STATUS. */

/* The interface is not set up. */
#define GMPV_STATUS_RESET 0x0
/* Written by the driver after it has set up the features and the queue. */
#define GMPV_STATUS_READY 0x1
/* The configuration of the queue is invalid, or the queue has become unusable. */
#define GMPV_STATUS_FAILED 0x80

/* Result of an operation. */

/* The operation was completed. */
#define GMPV_RESULT_DONE 0x0
/* A previous operation of the batch failed. */
#define GMPV_RESULT_NOT_BEGUN 0x1
/*
 * The batch is malformed: its sizes are inconsistent, or it contains a code that version 1 does not
 * define.
 */
#define GMPV_RESULT_MALFORMED 0x2
/* The operation belongs to a feature that was not offered or not accepted. */
#define GMPV_RESULT_UNSUPPORTED 0x3
/* The table, segment or channel does not exist. */
#define GMPV_RESULT_NO_OBJECT 0x4
/* An object with this handle already exists. */
#define GMPV_RESULT_EXISTS 0x5
/* The object has a different type. */
#define GMPV_RESULT_WRONG_TYPE 0x6
/* An index, count, address or size is out of range for the object. */
#define GMPV_RESULT_RANGE 0x7
/* A reserved bit or field is nonzero, or a value is undefined. */
#define GMPV_RESULT_INVALID 0x8
/* The operation exceeds a limit of the virtual machine or the card. */
#define GMPV_RESULT_LIMIT 0x9
/* The owner of the segment, or the operator, does not permit the operation. */
#define GMPV_RESULT_DENIED 0xa
/* The card failed to execute the operation. */
#define GMPV_RESULT_FAILED 0xb

/* Types of page tables. */

/*
 * A page directory with 8192 entries, each of which refers to a small-page table and a large-page
 * table.
 */
#define GMPV_KIND_DIRECTORY 0x1
/* A table that maps 32768 pages of 4 KiB. */
#define GMPV_KIND_SMALL 0x2
/* A table that maps 1024 pages of 128 KiB. */
#define GMPV_KIND_LARGE 0x3

/* Operation codes. */

/* Creates an empty table. */
#define GMPV_OP_TABLE_CREATE 0x1
/* Frees a table's handle. */
#define GMPV_OP_TABLE_DESTROY 0x2
/* Sets an entry of directory `handle`. */
#define GMPV_OP_DIRECTORY_SET 0x3
/* Writes consecutive entries of table `handle`, with values that increase by a constant. */
#define GMPV_OP_ENTRIES_RUN 0x4
/* Writes a list of consecutive entries of table `handle`. */
#define GMPV_OP_ENTRIES_LIST 0x5
/* Clears entries of table `handle`. */
#define GMPV_OP_ENTRIES_ZERO 0x6
/*
 * Binds the address space of an instance block to directory `handle`, or to the directory in the
 * instance block if the handle is 0.
 */
#define GMPV_OP_DIRECTORY_BIND 0x7
/* Flushes the TLB for directory `handle`, or for all address spaces if the handle is 0. */
#define GMPV_OP_FLUSH 0x8
/* Reserves channel `handle`. */
#define GMPV_OP_CHANNEL_CREATE 0x10
/* Binds channel `handle` to its instance block. */
#define GMPV_OP_CHANNEL_BIND 0x11
/* Permits channel `handle` to run while it is on the runlist. */
#define GMPV_OP_CHANNEL_ENABLE 0x12
/* Stops channel `handle`. */
#define GMPV_OP_CHANNEL_DISABLE 0x13
/* Unbinds channel `handle`. */
#define GMPV_OP_CHANNEL_DESTROY 0x14
/* Sets the runnable channels. */
#define GMPV_OP_RUNLIST 0x15
/* Fills guest VRAM with a 32-bit value. */
#define GMPV_OP_MEMORY_FILL 0x20
/* Copies guest VRAM between two ranges, which must not overlap. */
#define GMPV_OP_MEMORY_COPY 0x21
/* Sets the eviction priority of a guest VRAM range. */
#define GMPV_OP_BUFFER_PRIORITY 0x22
/* Finds or creates a segment by its key. */
#define GMPV_OP_SHARE_GET 0x30
/* Maps segment `handle` for a channel. */
#define GMPV_OP_SHARE_ATTACH 0x31
/* Unmaps segment `handle` for a channel. */
#define GMPV_OP_SHARE_DETACH 0x32
/* Queries or modifies segment `handle`. */
#define GMPV_OP_SHARE_CONTROL 0x33
/* Executes query `handle`, a value of GMPV_QUERY_*. */
#define GMPV_OP_QUERY 0x40

/* Flags for shared segments. */

/* Creates the segment if none has the key. */
#define GMPV_SHARE_CREATE 0x1
/* With GMPV_SHARE_CREATE: fails if a segment has the key. */
#define GMPV_SHARE_EXCLUSIVE 0x2
/*
 * Uses the segments of the group that the operator has assigned to the virtual machine, instead of
 * the virtual machine's own segments.
 */
#define GMPV_SHARE_ABROAD 0x4
/* Attaches the segment for reading only. */
#define GMPV_SHARE_READ_ONLY 0x8

/* Permissions of virtual machines other than the creator of the segment. */

/* Other machines can attach the segment for reading. */
#define GMPV_SHARE_MODE_READ 0x1
/* Other machines can attach the segment for writing. */
#define GMPV_SHARE_MODE_WRITE 0x2

/* Commands of GMPV_OP_SHARE_CONTROL. */

/* Returns the segment's size in bytes as the value of the answer. */
#define GMPV_SHARE_CONTROL_SIZE 0x1
/* Returns the number of address spaces of all virtual machines to which the segment is attached. */
#define GMPV_SHARE_CONTROL_ATTACHED 0x2
/* Returns the segment's GMPV_SHARE_MODE_*. */
#define GMPV_SHARE_CONTROL_MODE 0x3
/* Sets the segment's mode. */
#define GMPV_SHARE_CONTROL_SET_MODE 0x4
/* Removes the key. */
#define GMPV_SHARE_CONTROL_REMOVE 0x5

/* Queries of GMPV_OP_QUERY. */

/* Size of the vGPU's VRAM. */
#define GMPV_QUERY_VRAM 0x1
/* Maximum part of this VRAM on the card, or all ones if there is no limit. */
#define GMPV_QUERY_QUOTA 0x2
/* Guaranteed part of this VRAM on the card. */
#define GMPV_QUERY_GUARANTEE 0x3
/* Part of this VRAM that is currently on the card. */
#define GMPV_QUERY_PLACED 0x4
/* Part of this VRAM that is currently in host memory. */
#define GMPV_QUERY_HOST 0x5
/*
 * Part of this VRAM that would be on the card if all virtual machines used their full entitlements.
 */
#define GMPV_QUERY_ENTITLEMENT 0x6
/* Free memory on the card. */
#define GMPV_QUERY_FREE 0x7
/*
 * Memory pressure on the card: 0 if there is none, 1 if memory of other virtual machines is in host
 * memory, 2 if memory of this virtual machine is in host memory.
 */
#define GMPV_QUERY_PRESSURE 0x8
/* Entitlement to the card's time, in millionths. */
#define GMPV_QUERY_TIME_SHARE 0x9
/* Total size of page tables that the virtual machine can still create. */
#define GMPV_QUERY_TABLE_BYTES_LEFT 0xa

/* The PCI capability. */
struct gmpv_capability {
	/* GMPV_CAPABILITY_ID. */
	__u8 id;
	/* Offset of the next capability. */
	__u8 next;
	/* Size of this capability in bytes. */
	__u8 length;
	/* BAR that contains the registers. */
	__u8 bar;
	/* GMPV_SIGNATURE. */
	__le32 signature;
	/* GMPV_VERSION_MAJOR. */
	__u8 version_major;
	/* GMPV_VERSION_MINOR. */
	__u8 version_minor;
	/* Always 0. */
	__le16 reserved;
	/* Byte offset of the registers in the BAR. */
	__le32 offset;
	/* Features of the device: GMPV_FEATURE_*. */
	__le32 features;
};
_Static_assert(sizeof(struct gmpv_capability) == 20, "struct gmpv_capability");

/* Header of a batch. */
struct gmpv_batch_header {
	/* Number of operations, from 1 to GMPV_MAX_BATCH_OPS. */
	__le32 ops;
	/* Total size of the operations in bytes. */
	__le32 bytes;
};
_Static_assert(sizeof(struct gmpv_batch_header) == 8, "struct gmpv_batch_header");

/* Header of an operation. */
struct gmpv_op_header {
	/* Operation code: a value of GMPV_OP_*. */
	__le16 code;
	/* Size of the operation, including this header, in units of GMPV_UNIT bytes. */
	__le16 units;
	/* Handle of the object, or 0 if the operation has no object. */
	__le32 handle;
};
_Static_assert(sizeof(struct gmpv_op_header) == 8, "struct gmpv_op_header");

/* Header of the answer to a batch. */
struct gmpv_answer_header {
	/* GMPV_RESULT_DONE if all operations were completed. */
	__le32 status;
	/* Number of completed operations, which precede the failed one. */
	__le32 done;
};
_Static_assert(sizeof(struct gmpv_answer_header) == 8, "struct gmpv_answer_header");

/* Answer to an operation. */
struct gmpv_answer {
	/* Status of the operation: a value of GMPV_RESULT_*. */
	__le32 status;
	/* Always 0. */
	__le32 reserved;
	/* Result, if the operation is a query. */
	__le64 value;
};
_Static_assert(sizeof(struct gmpv_answer) == 16, "struct gmpv_answer");

/* Body of GMPV_OP_TABLE_CREATE. */
struct gmpv_table_create {
	/* Type of the table: a value of GMPV_KIND_*. */
	__le32 kind;
	/* Always 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_table_create) == 8, "struct gmpv_table_create");

/* Body of GMPV_OP_DIRECTORY_SET. */
struct gmpv_directory_set {
	/* Index of the entry. */
	__le32 index;
	/* Handle of the small-page table, or 0 if there is none. */
	__le32 small;
	/* Handle of the large-page table, or 0 if there is none. */
	__le32 large;
	/* Always 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_directory_set) == 16, "struct gmpv_directory_set");

/* Body of GMPV_OP_ENTRIES_RUN. */
struct gmpv_entries_run {
	/* Index of the first entry. */
	__le32 first;
	/* Number of entries. */
	__le32 count;
	/* First entry in hardware format, with guest addresses. */
	__le64 entry;
	/* Difference between consecutive entries, modulo 2^64. */
	__le64 step;
};
_Static_assert(sizeof(struct gmpv_entries_run) == 24, "struct gmpv_entries_run");

/* Body of GMPV_OP_ENTRIES_LIST, followed by the entries, and of GMPV_OP_ENTRIES_ZERO. */
struct gmpv_entries {
	/* Index of the first entry. */
	__le32 first;
	/* Number of entries. */
	__le32 count;
};
_Static_assert(sizeof(struct gmpv_entries) == 8, "struct gmpv_entries");

/* Body of GMPV_OP_DIRECTORY_BIND and GMPV_OP_CHANNEL_BIND. */
struct gmpv_instance {
	/* Guest VRAM address of an instance block, a multiple of 4 KiB. */
	__le64 instance;
};
_Static_assert(sizeof(struct gmpv_instance) == 8, "struct gmpv_instance");

/* Body of GMPV_OP_RUNLIST, followed by 32-bit channel numbers. */
struct gmpv_runlist {
	/* Number of channels. */
	__le32 count;
	/* Always 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_runlist) == 8, "struct gmpv_runlist");

/* Body of GMPV_OP_MEMORY_FILL. */
struct gmpv_memory_fill {
	/* Guest VRAM address, a multiple of 4. */
	__le64 address;
	/* Size in bytes, a multiple of 4 of at most GMPV_MAX_MEMORY_BYTES. */
	__le64 bytes;
	/* 32-bit value to write. */
	__le32 value;
	/* Always 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_memory_fill) == 24, "struct gmpv_memory_fill");

/* Body of GMPV_OP_MEMORY_COPY. */
struct gmpv_memory_copy {
	/* Destination address in guest VRAM, a multiple of 4. */
	__le64 to;
	/* Source address in guest VRAM, a multiple of 4. */
	__le64 from;
	/* Size in bytes, a multiple of 4 of at most GMPV_MAX_MEMORY_BYTES. */
	__le64 bytes;
};
_Static_assert(sizeof(struct gmpv_memory_copy) == 24, "struct gmpv_memory_copy");

/* Body of GMPV_OP_BUFFER_PRIORITY. */
struct gmpv_buffer_priority {
	/* Guest VRAM address. */
	__le64 address;
	/* Size in bytes. */
	__le64 bytes;
	/* Eviction priority, initially 0 for all memory. */
	__le32 priority;
	/* Always 0. */
	__le32 reserved;
};
_Static_assert(sizeof(struct gmpv_buffer_priority) == 24, "struct gmpv_buffer_priority");

/* Body of GMPV_OP_SHARE_GET. */
struct gmpv_share_get {
	/*
	 * Key agreed upon by the users of the segment, or 0 for a segment that other machines cannot find.
	 */
	__le64 key;
	/* Size in bytes, rounded up to a multiple of 4 KiB. */
	__le64 bytes;
	/* Flags of GMPV_SHARE_*. */
	__le32 flags;
	/* Permissions of GMPV_SHARE_MODE_*, used only if the segment is created. */
	__le32 mode;
};
_Static_assert(sizeof(struct gmpv_share_get) == 24, "struct gmpv_share_get");

/* Body of GMPV_OP_SHARE_ATTACH and GMPV_OP_SHARE_DETACH. */
struct gmpv_share_attach {
	/* Channel in whose address space the segment is mapped. */
	__le32 channel;
	/* Flags of GMPV_SHARE_*, or 0 to detach. */
	__le32 flags;
};
_Static_assert(sizeof(struct gmpv_share_attach) == 8, "struct gmpv_share_attach");

/* Body of GMPV_OP_SHARE_CONTROL. */
struct gmpv_share_control {
	/* Command: a value of GMPV_SHARE_CONTROL_*. */
	__le32 command;
	/* New value, or 0 for queries. */
	__le32 argument;
};
_Static_assert(sizeof(struct gmpv_share_control) == 8, "struct gmpv_share_control");

#endif
