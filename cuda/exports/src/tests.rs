//! Tests the tables as programs use them: looks up tables by UUID, and calls their slots.
//!
//! UNSAFETY: calls slots with the signatures that the runtime expects.
#![allow(unsafe_code, reason = "see UNSAFETY")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "see UNSAFETY: the slots have the signatures that the tests name"
)]

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Device, Driver, forget_context, install, result, table};

const RUNTIME: u128 = 0x6BD5_FB6C_5BF4_E74A_8987_D939_12FD_9DF9;
const HOOKS: u128 = 0xA094_798C_2E74_2E74_93F2_0800_200C_0A66;
const STORE: u128 = 0xC693_336E_1121_DF11_A8C3_68F3_55D8_9593;
const INTEGRITY: u128 = 0xD408_2055_BDE6_704B_8D34_BA12_3C66_E1F2;
const CHECKS: u128 = 0x263E_8860_7CD2_6143_92F6_BBD5_006D_FA7E;
const TOOLS: u128 = 0x42D8_5A81_23F6_CB47_8298_F6E7_8A3A_ECDC;
const IDENTITIES: u128 = 0x2131_8C60_9714_3248_8CA6_41FF_7324_C8F2;

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
    static READY: Cell<bool> = const { Cell::new(true) };
}

/// Reported calls to unsupported slots.
static REFUSED: Mutex<Vec<(String, usize)>> = Mutex::new(Vec::new());

struct Guest;

impl Driver for Guest {
    fn ready(&self) -> Result<(), i32> {
        if READY.get() { Ok(()) } else { Err(result::NOT_INITIALIZED) }
    }

    fn version(&self) -> u32 {
        13_000
    }

    fn devices(&self) -> Vec<Device> {
        vec![Device::default()]
    }

    fn primary_context(&self, device: i32) -> Result<u64, i32> {
        if device == 0 { Ok(0x7700) } else { Err(101) }
    }

    fn current_context(&self) -> Result<u64, i32> {
        match CURRENT.get() {
            0 => Err(201),
            context => Ok(context),
        }
    }

    fn context_id(&self, context: u64) -> Result<u64, i32> {
        if context == 0x7700 { Ok(3) } else { Err(201) }
    }

    fn load_module(&self, image: *const c_void) -> Result<u64, i32> {
        Ok(image as u64 + 1)
    }

    fn refused(&self, table: &str, slot: usize) {
        REFUSED.lock().expect("no panic").push((table.to_owned(), slot));
    }
}

/// Returns a pointer to a table's words.
fn words(uuid: u128) -> *const usize {
    install(&Guest);
    table(&uuid.to_be_bytes()).expect("a known table").cast()
}

/// Returns the function in a slot.
macro_rules! slot {
    ($uuid:ident, $slot:literal, fn($($argument:ty),*) $(-> $result:ty)?) => {
        unsafe {
            std::mem::transmute::<usize, unsafe extern "C" fn($($argument),*) $(-> $result)?>(*words($uuid).add($slot))
        }
    };
}

type Ended = unsafe extern "C" fn(u64, u64, u64);

fn put(context: u64, key: u64, value: u64, destructor: Option<Ended>) -> i32 {
    let put = slot!(STORE, 0, fn(u64, u64, u64, Option<Ended>) -> i32);
    unsafe { put(context, key, value, destructor) }
}

fn delete(context: u64, key: u64) -> i32 {
    let delete = slot!(STORE, 1, fn(u64, u64) -> i32);
    unsafe { delete(context, key) }
}

fn get(context: u64, key: u64) -> Result<u64, i32> {
    let get = slot!(STORE, 2, fn(*mut *mut c_void, u64, u64) -> i32);
    let mut value = null_mut();
    match unsafe { get(&raw mut value, context, key) } {
        0 => Ok(value as u64),
        error => Err(error),
    }
}

#[test]
fn sizes_of_tables_are_their_first_words() {
    for (uuid, bytes) in [(RUNTIME, 104), (HOOKS, 56), (INTEGRITY, 24), (CHECKS, 32), (TOOLS, 24), (IDENTITIES, 128)] {
        assert_eq!(unsafe { *words(uuid) }, bytes, "{uuid:x}");
    }
}

#[test]
fn unknown_tables_are_not_found() {
    for uuid in [0, 0xF8CF_F951_2146_8B4E_B9E2_FB46_9E7C_0DD9_u128] {
        assert!(table(&uuid.to_be_bytes()).is_none(), "{uuid:x}");
    }
}

#[test]
fn primary_contexts_and_modules_come_from_the_driver() {
    let primary = slot!(RUNTIME, 2, fn(*mut u64, i32) -> i32);
    let mut context = 0;
    assert_eq!(unsafe { primary(&raw mut context, 0) }, 0);
    assert_eq!(context, 0x7700);
    assert_eq!(unsafe { primary(&raw mut context, 1) }, 101);
    assert_eq!(unsafe { primary(null_mut(), 0) }, result::INVALID_VALUE);

    let load = slot!(RUNTIME, 6, fn(*mut u64, *const c_void, u64, u64, u32) -> i32);
    let image = 8 as *const c_void;
    let mut module = 0;
    assert_eq!(unsafe { load(&raw mut module, image, 0, 0, 0) }, 0);
    assert_eq!(module, 9);
    assert_eq!(unsafe { load(&raw mut module, image, 1, 0, 0) }, result::INVALID_VALUE);
    assert_eq!(unsafe { load(&raw mut module, std::ptr::null(), 0, 0, 0) }, result::INVALID_VALUE);
}

#[test]
fn buffers_for_tools_are_zero() {
    let hooks = slot!(HOOKS, 2, fn(*mut *mut u8, *mut usize));
    let further = slot!(HOOKS, 6, fn(*mut *mut u8, *mut usize));
    for (slot, size) in [(hooks, 1024), (further, 14)] {
        let (mut at, mut bytes) = (null_mut(), 0);
        unsafe { slot(&raw mut at, &raw mut bytes) };
        assert_eq!(bytes, size);
        // Runtimes treat the size as a number of entries of several bytes each.
        assert!(unsafe { std::slice::from_raw_parts(at, 8 * bytes) }.iter().all(|byte| *byte == 0));
    }
}

#[test]
fn current_context_and_its_identity_are_the_drivers() {
    let current = slot!(TOOLS, 2, fn(*mut u64) -> i32);
    let identity = slot!(IDENTITIES, 4, fn(u64, *mut u64) -> i32);
    let mut answer = 9;
    assert_eq!(unsafe { current(&raw mut answer) }, 0);
    assert_eq!(answer, 0, "no context is no error here");
    CURRENT.set(0x7700);
    assert_eq!(unsafe { current(&raw mut answer) }, 0);
    assert_eq!(answer, 0x7700);
    assert_eq!(unsafe { identity(0x7700, &raw mut answer) }, 0);
    assert_eq!(answer, 3);
    assert_eq!(unsafe { identity(0, &raw mut answer) }, 0);
    assert_eq!(answer, 0);
    assert_eq!(unsafe { identity(0x7701, &raw mut answer) }, 201);
    assert_eq!(unsafe { identity(0, null_mut()) }, result::INVALID_VALUE);
}

#[test]
fn checks_are_never_active() {
    let check = slot!(CHECKS, 2, fn(u64, *mut u32, *mut *mut c_void) -> i32);
    let needed = slot!(CHECKS, 3, fn() -> i32);
    let mut active = 7;
    assert_eq!(unsafe { check(1, &raw mut active, null_mut()) }, 0);
    assert_eq!(active, 0);
    assert_eq!(unsafe { needed() }, 0);
}

#[test]
fn unknown_slots_fail_and_are_reported_once() {
    let unknown = slot!(IDENTITIES, 5, fn(u64, u64, u64) -> i32);
    for _ in 0..3 {
        assert_eq!(unsafe { unknown(1, 2, 3) }, result::NOT_SUPPORTED);
    }
    let refused = REFUSED.lock().expect("no panic");
    let of_slot = refused.iter().filter(|(table, slot)| table.starts_with("21318C60") && *slot == 5).count();
    assert_eq!(of_slot, 1);
}

#[test]
fn integrity_answer_needs_a_ready_driver() {
    let answer = slot!(INTEGRITY, 1, fn(u32, u64, *mut [u8; 16]) -> i32);
    let mut bytes = [0; 16];
    READY.set(false);
    assert_eq!(unsafe { answer(13_050, 1, &raw mut bytes) }, result::NOT_INITIALIZED);
    READY.set(true);
    let mut ask = |version| {
        assert_eq!(unsafe { answer(version, 1, &raw mut bytes) }, 0);
        bytes
    };
    let (zero, one, two) = (ask(13_050), ask(13_051), ask(13_052));
    assert!(zero != one && one != two && zero != two);
    assert_eq!(ask(12_090), zero, "the first answer is constant");
    assert_eq!(ask(13_052), two, "the third answer is the same for the same query");
    assert_eq!(unsafe { answer(13_053, 1, &raw mut bytes) }, result::INVALID_VALUE);
}

#[test]
fn stored_value_belongs_to_its_context_and_key() {
    assert_eq!(put(0x1_0010, 1, 100, None), 0);
    assert_eq!(put(0x1_0010, 2, 200, None), 0);
    assert_eq!(put(0x1_0020, 1, 300, None), 0);
    for _ in 0..2 {
        assert_eq!(get(0x1_0010, 1), Ok(100));
        assert_eq!(get(0x1_0010, 2), Ok(200));
        assert_eq!(get(0x1_0020, 1), Ok(300));
        assert_eq!(get(0x1_0020, 2), Err(result::INVALID_HANDLE));
    }
    assert_eq!(put(0x1_0010, 1, 101, None), 0);
    assert_eq!(get(0x1_0010, 1), Ok(101), "a new value replaces a cached one");
    assert_eq!(delete(0x1_0010, 1), 0);
    assert_eq!(get(0x1_0010, 1), Err(result::INVALID_HANDLE), "a deleted value is not cached");
    assert_eq!(delete(0x1_0010, 1), result::INVALID_HANDLE);
}

#[test]
fn context_zero_is_the_threads_current_one() {
    assert_eq!(get(0, 3), Err(201));
    CURRENT.set(0x2_0010);
    assert_eq!(put(0, 3, 5, None), 0);
    assert_eq!(get(0x2_0010, 3), Ok(5));
    CURRENT.set(0x2_0020);
    assert_eq!(get(0, 3), Err(result::INVALID_HANDLE));
}

/// Sum of the values passed to [`end`].
static ENDED: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn end(context: u64, key: u64, value: u64) {
    assert_eq!((context, key), (0x3_0010, 4));
    assert_eq!(put(0x3_0010, 5, 1, None), 0, "a destructor may call the store");
    ENDED.fetch_add(value, Ordering::SeqCst);
}

#[test]
fn ended_context_loses_its_values_after_their_destructors() {
    assert_eq!(put(0x3_0010, 4, 70, Some(end)), 0);
    assert_eq!(put(0x3_0020, 4, 80, None), 0);
    assert_eq!(get(0x3_0010, 4), Ok(70));
    forget_context(0x3_0010);
    assert_eq!(ENDED.load(Ordering::SeqCst), 70);
    assert_eq!(get(0x3_0010, 4), Err(result::INVALID_HANDLE));
    assert_eq!(get(0x3_0020, 4), Ok(80));
    forget_context(0x3_0010);
    assert_eq!(ENDED.load(Ordering::SeqCst), 70);
}

/// Reads a value in several threads while another thread replaces it repeatedly. No reader may see an older value after
/// a newer one.
#[test]
fn replaced_value_reaches_all_threads_in_order() {
    const LAST: u64 = 20_000;
    assert_eq!(put(0x4_0010, 6, 1, None), 0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut before = 0;
                while before != LAST {
                    let value = get(0x4_0010, 6).expect("the value is there");
                    assert!(value >= before, "{value} after {before}");
                    before = value;
                }
            });
        }
        scope.spawn(|| (2..=LAST).for_each(|value| assert_eq!(put(0x4_0010, 6, value, None), 0)));
    });
}
