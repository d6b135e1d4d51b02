# Starts a Linux kernel that is already in memory.
#
# It has the format of a bzImage: the firmware reads it byte by byte, so it must be short. The kernel's file is at
# KERNEL, the initial RAM disk at RAMDISK; the assembler's command line defines both. It puts the kernel where the
# boot protocol requires it and enters it, like a boot loader.
#
# Source: the x86 boot protocol in the kernel's documentation.

.code16
.set HIGH, 0x100000             # where the protected-mode part goes
.set SETUP_SEGMENT, 0x3000      # where the real-mode part goes
.set SETUP, SETUP_SEGMENT << 4
.set STACK, 0xe000              # in that segment; its heap ends below
.set OWN, 0x10000               # where QEMU's firmware puts this

# Fields of the header.
.set SETUP_SECTS, 0x1f1
.set SYSSIZE, 0x1f4
.set TYPE_OF_LOADER, 0x210
.set LOADFLAGS, 0x211
.set RAMDISK_IMAGE, 0x218
.set RAMDISK_SIZE, 0x21c
.set HEAP_END_PTR, 0x224
.set CMD_LINE_PTR, 0x228

        .org SETUP_SECTS
        .byte 1                 # setup_sects
        .word 0                 # root_flags
        .long 1                 # syssize: 16 bytes
        .org 0x1fe
        .word 0xaa55
        .org 0x200
        jmp start
        .ascii "HdrS"
        .word 0x0206            # version
        .org TYPE_OF_LOADER
        .byte 0
        .byte 1                 # loadflags: loaded high
        .org 0x214
        .long HIGH              # code32_start
        .org HEAP_END_PTR
        .word 0
        .org CMD_LINE_PTR
        .long 0
        .long 0x7fffffff        # initrd_addr_max
        .org 0x260
# Bytes of the RAM disk: `boot.rs` writes them here.
size:   .long 0

# One flat segment for data.
        .balign 8
table:  .quad 0
        .quad 0x00cf92000000ffff
table_end:
register:
        .word table_end - table - 1
        .long OWN + table

start:  cli
        cld
        movw %cs, %ax
        subw $0x20, %ax
        movw %ax, %ds
        movl size, %ebp
# Real mode with segments of 4 GiB.
        lgdtl register
        movl %cr0, %eax
        orb $1, %al
        movl %eax, %cr0
        movw $8, %bx
        movw %bx, %ds
        movw %bx, %es
        andb $0xfe, %al
        movl %eax, %cr0
        xorw %ax, %ax
        movw %ax, %ds
        movw %ax, %es
# The real-mode part.
        movl $KERNEL, %esi
        movzbl SETUP_SECTS(%esi), %ecx
        incl %ecx
        shll $7, %ecx           # sectors to words of 4 bytes
        movl SYSSIZE(%esi), %edx
        movl $SETUP, %edi
        addr32 rep movsl
# The protected-mode part follows it.
        movl %edx, %ecx
        shll $2, %ecx           # 16 bytes to words of 4
        movl $HIGH, %edi
        addr32 rep movsl
# Fields that a loader sets for the kernel.
        movl $SETUP, %edi
        movb $0xb0, TYPE_OF_LOADER(%edi)
        orb $0x80, LOADFLAGS(%edi)
        movl $RAMDISK, RAMDISK_IMAGE(%edi)
        movl %ebp, RAMDISK_SIZE(%edi)
        movw $STACK - 0x200, HEAP_END_PTR(%edi)
        movl $OWN, %esi
        movl CMD_LINE_PTR(%esi), %eax
        movl %eax, CMD_LINE_PTR(%edi)
        movw $SETUP_SEGMENT, %ax
        movw %ax, %ds
        movw %ax, %es
        movw %ax, %fs
        movw %ax, %gs
        movw %ax, %ss
        movw $STACK, %sp
        ljmp $SETUP_SEGMENT + 0x20, $0
        .org 0x400
        .fill 16
