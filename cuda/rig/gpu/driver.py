"""NVIDIA's driver API through ctypes: the few calls that the programs of `neighbours.py` and `faults.py` make."""

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p

LAUNCH_BLOCKS, LAUNCH_THREADS = 264, 1024
CAPTURE_MODE_GLOBAL = 0
EVENT_DISABLE_TIMING = 2
ACCESS_READ_WRITE = 3
DEVICE_LOCATION, HOST_NUMA_LOCATION = 1, 3

# Spins for `us` microseconds of the card's clock in every thread, and then adds `us` to a word once.
SPIN_PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 us, .param .u64 word)
{
    .reg .pred %p<3>;
    .reg .u32 %r<3>;
    .reg .u64 %t<8>;
    ld.param.u64 %t0, [us];
    ld.param.u64 %t1, [word];
    mul.lo.u64 %t2, %t0, 1000;
    mov.u64 %t3, %globaltimer;
spinning:
    mov.u64 %t4, %globaltimer;
    sub.u64 %t5, %t4, %t3;
    setp.lt.u64 %p0, %t5, %t2;
    @%p0 bra spinning;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    or.b32 %r0, %r0, %r1;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra done;
    cvta.to.global.u64 %t6, %t1;
    ld.global.u64 %t7, [%t6];
    add.u64 %t7, %t7, %t0;
    st.global.u64 [%t6], %t7;
done:
    ret;
}
\0"""


class CudaError(Exception):
    """A driver call failed."""

    def __init__(self, call: str, code: int):
        super().__init__(f"{call} failed with {code}")
        self.call, self.code = call, code


class Location(ctypes.Structure):
    _fields_ = [("kind", c_int), ("id", c_int)]


class AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = [("kind", c_int), ("handle_types", c_int), ("location", Location), ("windows", c_void_p),
                ("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort),
                ("reserved", ctypes.c_ubyte * 4)]


class AccessDescription(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("location", Location), ("flags", c_int)]


class Driver:
    """A driver library. Every method raises `CudaError` if the driver call fails."""

    def __init__(self, path: str = "libcuda.so.1"):
        self._library = ctypes.CDLL(path)

    def call(self, name: str, *arguments) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise CudaError(name, code)

    def make_context(self) -> int:
        """Makes the primary context of device 0 current, and returns it."""
        device, context = c_int(), c_void_p()
        self.call("cuInit", c_uint(0))
        self.call("cuDeviceGet", ctypes.byref(device), c_int(0))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.enter_context(context.value)
        return context.value

    def current_context(self) -> int:
        context = c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value

    def enter_context(self, context: int) -> None:
        self.call("cuCtxSetCurrent", c_void_p(context))

    def allocate(self, size: int) -> int:
        address = c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", c_uint64(address))

    def memory(self) -> tuple[int, int]:
        """Returns the free and the total memory in bytes."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def kernel(self) -> int:
        """Loads the spinning kernel."""
        module, function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), c_char_p(SPIN_PTX))
        self.call("cuModuleGetFunction", ctypes.byref(function), module, c_char_p(b"spin"))
        return function.value

    def stream(self) -> int:
        stream = c_void_p()
        self.call("cuStreamCreate", ctypes.byref(stream), c_uint(1))
        return stream.value

    def event(self) -> int:
        event = c_void_p()
        self.call("cuEventCreate", ctypes.byref(event), c_uint(EVENT_DISABLE_TIMING))
        return event.value

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", c_void_p(event), c_void_p(stream))

    def wait_for(self, event: int) -> None:
        self.call("cuEventSynchronize", c_void_p(event))

    def read_word(self, address: int) -> int:
        """Waits for the work in the current context, and returns 8 bytes of the card's memory."""
        value = c_uint64()
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", ctypes.byref(value), c_uint64(address), c_size_t(8))
        return value.value

    def spin(self, kernel: int, us: int, word: int, stream: int, blocks: int = LAUNCH_BLOCKS) -> None:
        """Launches the spinning kernel, by default on all multiprocessors."""
        values = [c_uint64(us), c_uint64(word)]
        pointers = (c_void_p * 2)(*(ctypes.addressof(value) for value in values))
        sizes = [c_uint(size) for size in (blocks, 1, 1, LAUNCH_THREADS, 1, 1, 0)]
        self.call("cuLaunchKernel", c_void_p(kernel), *sizes, c_void_p(stream), pointers, c_void_p())

    def begin_capture(self, stream: int) -> None:
        self.call("cuStreamBeginCapture_v2", c_void_p(stream), c_int(CAPTURE_MODE_GLOBAL))

    def reserve(self, size: int) -> int:
        address = c_uint64()
        self.call("cuMemAddressReserve", ctypes.byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        return address.value

    def create_compressible(self, size: int) -> int:
        handle = c_uint64()
        properties = AllocationProperties(kind=1, location=Location(DEVICE_LOCATION, 0), compression=1)
        self.call("cuMemCreate", ctypes.byref(handle), c_size_t(size), ctypes.byref(properties), c_uint64(0))
        return handle.value

    def create_host(self, size: int) -> int:
        """Creates pinned host memory of NUMA node 0, as an owner does for chunks."""
        handle = c_uint64()
        properties = AllocationProperties(kind=1, location=Location(HOST_NUMA_LOCATION, 0))
        self.call("cuMemCreate", ctypes.byref(handle), c_size_t(size), ctypes.byref(properties), c_uint64(0))
        return handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        self.call("cuMemMap", c_uint64(address), c_size_t(size), c_size_t(0), c_uint64(handle), c_uint64(0))
        access = AccessDescription(Location(DEVICE_LOCATION, 0), ACCESS_READ_WRITE)
        self.call("cuMemSetAccess", c_uint64(address), c_size_t(size), ctypes.byref(access), c_size_t(1))

    def release(self, handle: int) -> None:
        self.call("cuMemRelease", c_uint64(handle))
