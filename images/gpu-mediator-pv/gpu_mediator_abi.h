/* SPDX-License-Identifier: GPL-2.0-only OR MIT */
/*
 * The binary interface between a guest's driver and the mediator: see pv/src/abi.rs, which says what each thing means.
 */
#ifndef GPU_MEDIATOR_ABI_H
#define GPU_MEDIATOR_ABI_H

#include <linux/types.h>

#define GMPV_VERSION_MAJOR	1
#define GMPV_VERSION_MINOR	0
#define GMPV_CAPABILITY_ID	0x09
#define GMPV_SIGNATURE		0x56504d47

struct gmpv_capability {
	__u8 id;
	__u8 next;
	__u8 length;
	__u8 bar;
	__le32 signature;
	__u8 version_major;
	__u8 version_minor;
	__le16 reserved;
	__le32 offset;
	__le32 features;
};

#define GMPV_FEATURE_TABLES		(1 << 0)
#define GMPV_FEATURE_CHANNELS		(1 << 1)
#define GMPV_FEATURE_MEMORY		(1 << 2)
#define GMPV_FEATURE_PRIORITY		(1 << 3)
#define GMPV_FEATURE_SHARE		(1 << 4)
#define GMPV_FEATURE_SHARE_ABROAD	(1 << 5)
#define GMPV_FEATURE_QUERY		(1 << 6)
#define GMPV_FEATURE_INTERRUPT		(1 << 7)

#define GMPV_REGISTER_SIGNATURE		0x00
#define GMPV_REGISTER_FEATURES		0x04
#define GMPV_REGISTER_STATUS		0x08
#define GMPV_REGISTER_QUEUE_SIZE	0x0c
#define GMPV_REGISTER_QUEUE_DESCRIPTORS	0x10
#define GMPV_REGISTER_QUEUE_AVAILABLE	0x18
#define GMPV_REGISTER_QUEUE_USED	0x20
#define GMPV_REGISTER_DOORBELL		0x28
#define GMPV_REGISTER_ENDED		0x2c
#define GMPV_REGISTER_INTERRUPT		0x30
#define GMPV_REGISTER_INTERRUPT_ENABLE	0x34
#define GMPV_REGISTER_BYTES		0x40

#define GMPV_STATUS_RESET	0
#define GMPV_STATUS_READY	1
#define GMPV_STATUS_FAILED	0x80

#define GMPV_MAX_QUEUE		256
#define GMPV_MAX_BATCH_BYTES	0x10000
#define GMPV_MAX_BATCH_OPS	1024
#define GMPV_UNIT		8

struct gmpv_batch_header {
	__le32 ops;
	__le32 bytes;
};

struct gmpv_op_header {
	__le16 code;
	__le16 units;
	__le32 handle;
};

struct gmpv_answer_header {
	__le32 status;
	__le32 done;
};

struct gmpv_answer {
	__le32 status;
	__le32 reserved;
	__le64 value;
};

#define GMPV_RESULT_DONE		0
#define GMPV_RESULT_NOT_BEGUN		1
#define GMPV_RESULT_MALFORMED		2
#define GMPV_RESULT_UNSUPPORTED		3
#define GMPV_RESULT_NO_OBJECT		4
#define GMPV_RESULT_EXISTS		5
#define GMPV_RESULT_WRONG_TYPE		6
#define GMPV_RESULT_RANGE		7
#define GMPV_RESULT_INVALID		8
#define GMPV_RESULT_LIMIT		9
#define GMPV_RESULT_DENIED		10
#define GMPV_RESULT_FAILED		11

#define GMPV_KIND_DIRECTORY	1
#define GMPV_KIND_SMALL		2
#define GMPV_KIND_LARGE		3

#define GMPV_OP_TABLE_CREATE	0x01
#define GMPV_OP_TABLE_DESTROY	0x02
#define GMPV_OP_DIRECTORY_SET	0x03
#define GMPV_OP_ENTRIES_RUN	0x04
#define GMPV_OP_ENTRIES_LIST	0x05
#define GMPV_OP_ENTRIES_ZERO	0x06
#define GMPV_OP_DIRECTORY_BIND	0x07
#define GMPV_OP_FLUSH		0x08
#define GMPV_OP_CHANNEL_CREATE	0x10
#define GMPV_OP_CHANNEL_BIND	0x11
#define GMPV_OP_CHANNEL_ENABLE	0x12
#define GMPV_OP_CHANNEL_DISABLE	0x13
#define GMPV_OP_CHANNEL_DESTROY	0x14
#define GMPV_OP_RUNLIST		0x15
#define GMPV_OP_MEMORY_FILL	0x20
#define GMPV_OP_MEMORY_COPY	0x21
#define GMPV_OP_BUFFER_PRIORITY	0x22
#define GMPV_OP_SHARE_GET	0x30
#define GMPV_OP_SHARE_ATTACH	0x31
#define GMPV_OP_SHARE_DETACH	0x32
#define GMPV_OP_SHARE_CONTROL	0x33
#define GMPV_OP_QUERY		0x40

struct gmpv_table_create {
	__le32 kind;
	__le32 reserved;
};

struct gmpv_directory_set {
	__le32 index;
	__le32 small;
	__le32 large;
	__le32 reserved;
};

struct gmpv_entries_run {
	__le32 first;
	__le32 count;
	__le64 entry;
	__le64 step;
};

struct gmpv_entries {
	__le32 first;
	__le32 count;
};

struct gmpv_instance {
	__le64 instance;
};

struct gmpv_runlist {
	__le32 count;
	__le32 reserved;
};

struct gmpv_memory_fill {
	__le64 address;
	__le64 bytes;
	__le32 value;
	__le32 reserved;
};

struct gmpv_memory_copy {
	__le64 to;
	__le64 from;
	__le64 bytes;
};

struct gmpv_buffer_priority {
	__le64 address;
	__le64 bytes;
	__le32 priority;
	__le32 reserved;
};

struct gmpv_share_get {
	__le64 key;
	__le64 bytes;
	__le32 flags;
	__le32 mode;
};

struct gmpv_share_attach {
	__le32 channel;
	__le32 flags;
};

struct gmpv_share_control {
	__le32 command;
	__le32 argument;
};

#define GMPV_MAX_MEMORY_BYTES	0x1000000

#define GMPV_SHARE_CREATE	(1 << 0)
#define GMPV_SHARE_EXCLUSIVE	(1 << 1)
#define GMPV_SHARE_ABROAD	(1 << 2)
#define GMPV_SHARE_READ_ONLY	(1 << 3)
#define GMPV_SHARE_MODE_READ	(1 << 0)
#define GMPV_SHARE_MODE_WRITE	(1 << 1)
#define GMPV_SHARE_CONTROL_SIZE		1
#define GMPV_SHARE_CONTROL_ATTACHED	2
#define GMPV_SHARE_CONTROL_MODE		3
#define GMPV_SHARE_CONTROL_SET_MODE	4
#define GMPV_SHARE_CONTROL_REMOVE	5

#define GMPV_QUERY_VRAM			1
#define GMPV_QUERY_QUOTA		2
#define GMPV_QUERY_GUARANTEE		3
#define GMPV_QUERY_PLACED		4
#define GMPV_QUERY_HOST			5
#define GMPV_QUERY_ENTITLEMENT		6
#define GMPV_QUERY_FREE			7
#define GMPV_QUERY_PRESSURE		8
#define GMPV_QUERY_TIME_SHARE		9
#define GMPV_QUERY_TABLE_BYTES_LEFT	10

#endif
