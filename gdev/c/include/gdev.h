/* Gdev's interface, generated from the crate gdev-c by `cargo run -p gdev-c --example gdev_header`. */

#ifndef GDEV_H
#define GDEV_H

#include <stdint.h>
#include <time.h>

// Flag of [`gshmget`]: the key is one of the sharing group to which the operator assigned this virtual machine.
#define GDEV_SHM_GROUP 65536

// A context: the number that [`gopen`] returned.
typedef uint64_t Ghandle;

// Description of a kernel in raw code for `sm_20`.
struct gdev_kernel {
  // Name of the kernel.
  const char *name;
  // Offset of its first instruction in the code, in bytes.
  uint32_t entry_offset;
  // Size of its code in bytes.
  uint32_t size;
  // Registers of a thread.
  uint32_t registers;
  // Static shared memory of a block in bytes.
  uint32_t shared_bytes;
  // Local memory of a thread in bytes.
  uint32_t local_bytes;
  // Barriers of a block.
  uint32_t barriers;
  // Size of the parameters in bytes.
  uint32_t params;
};

// Number of blocks, and of threads of a block, in x, y and z.
struct gdev_grid {
  // Number of blocks.
  uint32_t blocks[3];
  // Number of threads of a block.
  uint32_t threads[3];
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Opens device `minor` and creates a context. The device is a CUDA device if one exists, and otherwise a render node
// of nouveau. The environment variable `GDEV_TARGET` names another device, as for [`gdev_open`]. Returns 0 on error.
Ghandle gopen(int minor);

// Opens the device with a name: `cuda`, `cuda:NUMBER`, `nouveau`, `nouveau:/dev/dri/renderD128` or `vgpu:/SOCKET`.
// Returns 0 on error.
Ghandle gdev_open(const char *target);

// Waits for all work, closes a context, and frees its memory.
int gclose(Ghandle handle);

// Returns the message of the calling thread's last error. It is valid until the thread's next error.
const char *gerror(void);

// Queries a value of the device. Query 1 returns the alignment of card memory in bytes; query 2 returns 1 if the
// device has segments, and 0 otherwise.
int gquery(Ghandle handle,
           uint32_t query,
           uint64_t *result);

// Sets a limit of copies. Setting 1 is the size of the pieces in bytes; settings 2 and 3 are the maximum sizes of a
// direct write and read in bytes; setting 4 is 1 if the CPU and the copy engine work at the same time, and 0
// otherwise.
int gtune(Ghandle handle,
          uint32_t setting,
          uint32_t value);

// Loads kernels. A CUDA device accepts PTX or a cubin; other devices accept a cubin or assembly for `sm_20`. `module`
// receives the module's number.
int gload(Ghandle handle,
          const void *image,
          uint64_t size,
          uint32_t *module);

// Loads raw code for `sm_20`: 64-bit instructions, with descriptions of its `count` kernels.
int gload_raw(Ghandle handle,
              const void *code,
              uint64_t size,
              const struct gdev_kernel *kernels,
              uint32_t count,
              uint32_t *module);

// Launches a kernel of a module without waiting; `params` has the parameters as the kernel declares them. `id`
// receives the number for [`gsync`]. The kernel may use all memory of the handle.
int glaunch(Ghandle handle,
            uint32_t module,
            const char *kernel,
            const struct gdev_grid *grid,
            const void *params,
            uint64_t params_size,
            uint64_t *id);

// Waits for the work with a number, and for all earlier work. With a `timeout`, waits at most that long, and returns
// `-ETIMEDOUT` if the time is over.
int gsync(Ghandle handle,
          uint64_t id,
          const struct timespec *timeout);

// Waits for all work of a handle.
int gbarrier(Ghandle handle);

// Allocates `size` bytes of card memory. Returns the memory's address for the GPU, or 0 on error.
uint64_t gmalloc(Ghandle handle, uint64_t size);

// Frees card memory from [`gmalloc`]. Returns its size in bytes, or 0 on error.
uint64_t gfree(Ghandle handle, uint64_t address);

// Allocates `size` bytes of pinned memory. Returns the memory's address in this process, or NULL on error.
void *gmalloc_dma(Ghandle handle,
                  uint64_t size);

// Frees pinned memory from [`gmalloc_dma`]. Returns its size in bytes, or 0 on error.
uint64_t gfree_dma(Ghandle handle, void *buffer);

// Copies `size` bytes from this process to the card, after all earlier work, and waits.
int gmemcpy_to_device(Ghandle handle, uint64_t to, const void *from, uint64_t size);

// Copies `size` bytes from the card to this process, after all earlier work, and waits.
int gmemcpy_from_device(Ghandle handle, void *to, uint64_t from, uint64_t size);

// Copies `size` bytes of pinned memory to the card without waiting; `id` receives the number for `gsync`.
int gmemcpy_to_device_async(Ghandle handle,
                            uint64_t to,
                            const void *from,
                            uint64_t size,
                            uint64_t *id);

// Copies `size` bytes from the card to pinned memory without waiting; `id` receives the number for `gsync`.
int gmemcpy_from_device_async(Ghandle handle,
                              void *to,
                              uint64_t from,
                              uint64_t size,
                              uint64_t *id);

// Copies `write_size` bytes of pinned memory to the card, and `read_size` bytes from the card to pinned memory, after
// all earlier work, and waits. Both copies are executed at the same time if the card has two copy engines.
int gmemcpy_both(Ghandle handle,
                 uint64_t to,
                 const void *from,
                 uint64_t write_size,
                 void *read_to,
                 uint64_t read_from,
                 uint64_t read_size);

// Copies `size` bytes on the card, and waits.
int gmemcpy(Ghandle handle, uint64_t to, uint64_t from, uint64_t size);

// Copies `size` bytes on the card without waiting; `id` receives the number for `gsync`.
int gmemcpy_async(Ghandle handle, uint64_t to, uint64_t from, uint64_t size, uint64_t *id);

// Finds the segment with a key, or creates it if `flags` contains `IPC_CREAT`; the lower nine bits of `flags` are its
// permissions. With [`GDEV_SHM_GROUP`], the other machines of the group find the segment and read it, and with the
// permission bit 0002 they also write it. Returns the segment's number, or a negative error.
int gshmget(Ghandle handle,
            int key,
            uint64_t size,
            int flags);

// Maps a segment, read-only if `flags` contains `SHM_RDONLY`. Returns its address for the GPU, or 0 on error. The
// driver chooses the address, so `address` must be 0.
uint64_t gshmat(Ghandle handle,
                int id,
                uint64_t address,
                int flags);

// Waits for all work and unmaps a segment.
int gshmdt(Ghandle handle, uint64_t address);

// Controls a segment. `IPC_RMID` removes its key, and the segment is freed when no context has it attached. `IPC_STAT`
// stores the number of contexts that have it attached in `buffer`, as a `uint64_t`.
int gshmctl(Ghandle handle,
            int id,
            int command,
            void *buffer);

// Maps memory that `master` has allocated with [`crate::gmalloc`] into `slave`. Returns the memory's address in
// `slave`, or 0 on error. The memory lives until both contexts have freed it.
uint64_t gref(Ghandle master,
              uint64_t address,
              uint64_t size,
              Ghandle slave);

// Frees a reference.
int gunref(Ghandle handle, uint64_t address);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GDEV_H */
