//! Event counters. A single declaration defines a counter's field, description, and name for operators. `cargo xtask
//! check` rejects a counter that is never incremented.

/// Declares a struct of counters. Each field has a doc line and a metric name.
macro_rules! counts {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])+ $field:ident: $metric:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default)]
        pub(crate) struct $name {
            $($(#[$doc])+ pub(crate) $field: u64,)+
        }

        impl $name {
            /// Returns all counters with their names for operators.
            pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                [$(($metric, self.$field)),+].into_iter()
            }

            /// Restores the counters for which `value_of` returns a value, and sets all others to 0.
            #[allow(dead_code, reason = "not all counters are restored in another process")]
            pub(crate) fn restore(value_of: impl Fn(&str) -> Option<u64>) -> Self {
                Self { $($field: value_of($metric).unwrap_or(0)),+ }
            }
        }
    };
}

pub(crate) use counts;
