//! Debian's headless Chromium, in a folder that a test mounts as root, because the browser
//! looks for its files next to its program.

/// Path of the browser in its folder.
pub const PROGRAM: &str = "/usr/lib/chromium/chromium-headless-shell";
