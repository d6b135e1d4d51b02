//! Executes host functions of the guest in stream order. The driver calls a function of the worker, which notifies the
//! guest and waits until the guest has run its function.
//!
//! UNSAFETY: the driver calls the function with the number that the worker passed to the driver.
#![allow(unsafe_code, reason = "see UNSAFETY")]

use std::ffi::c_void;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use cuda_calls::{Fault, Handles as _, Kind, own};
use cuda_ring::{Shared, Words as _, control};

use crate::driver::Needed;
use crate::executor::{Broken, Executor};
use crate::pending::Origin;

/// State for callbacks on the driver's threads: shared memory, and a function that wakes the guest.
struct Callbacks {
    control: Shared,
    notify: Box<dyn Fn() + Send + Sync>,
    posted: Mutex<u64>,
}

/// The state of this worker's callbacks. A static variable, because the driver passes only one word, and may call the
/// function after all other values have been dropped.
static CALLBACKS: OnceLock<Callbacks> = OnceLock::new();

/// Prepares callbacks. `posted` is the number of callbacks that the program's previous workers posted. `notify` wakes
/// sleeping guest threads.
pub(crate) fn prepare(control: Shared, posted: u64, notify: Box<dyn Fn() + Send + Sync>) {
    let _ = CALLBACKS.set(Callbacks { control, notify, posted: Mutex::new(posted) });
}

/// Returns the number of callbacks that this worker and the program's previous workers have posted to the guest.
pub(crate) fn posted() -> u64 {
    CALLBACKS.get().map_or(0, |callbacks| *callbacks.posted.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Interval at which the worker checks whether the guest has finished a callback.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

unsafe extern "C" fn run(data: *mut c_void) {
    let Some(callbacks) = CALLBACKS.get() else { return };
    let control = &callbacks.control;
    let mine = {
        let mut posted = callbacks.posted.lock().unwrap_or_else(PoisonError::into_inner);
        while posted.wrapping_sub(control.load(control::CALLBACKS_DONE)) >= control::CALLBACK_COUNT {
            std::thread::sleep(POLL_INTERVAL);
        }
        control.store(control::CALLBACKS + 8 * (*posted % control::CALLBACK_COUNT), data as u64);
        *posted += 1;
        control.store(control::CALLBACKS_POSTED, *posted);
        *posted
    };
    (callbacks.notify)();
    // The stream continues when the guest's function has returned. A function that never returns blocks only its
    // guest's own streams.
    while control.load(control::CALLBACKS_DONE) < mine {
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the address of the function that the driver calls with a callback's number.
pub(crate) fn callback() -> u64 {
    let function: unsafe extern "C" fn(*mut c_void) = run;
    function as usize as u64
}

impl Executor {
    /// Enqueues a callback.
    pub(crate) fn host_function(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let [stream, number] = *words else { return Err(Broken::Malformed) };
        let code = match self.objects.find(Kind::Stream, stream) {
            Ok(stream) => {
                let number = if self.is_capturing(stream) { number | own::CAPTURED } else { number };
                self.driver.invoke(Needed::HostFunction, &[stream, callback(), number])
            }
            Err(Fault::Refused(code)) => code,
            Err(Fault::Malformed) => return Err(Broken::Malformed),
        };
        self.finish(origin, code, &[]);
        Ok(())
    }
}
