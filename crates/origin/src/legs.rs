//! How a mirror is written: `mirror:` and its legs, each as an origin of its own is written, with `|` between
//! two. In a leg, `%` and `|` are written `%25` and `%7C`.

use crate::open::OpenError;
use hearth_io::{OriginSpec, Source};

/// The scheme of mirrors.
pub(crate) const MIRROR: &str = "mirror";
/// Most legs.
pub const LEGS_MAX: usize = 8;

/// The legs behind the scheme. Only their form is looked at.
pub(crate) fn read(rest: &str) -> Result<Vec<OriginSpec>, OpenError> {
    let wrong = |why: String| OpenError::Mirror(why);
    let legs = rest.split('|').map(|leg| {
        let leg = leg.replace("%7C", "|").replace("%25", "%");
        let spec: OriginSpec = leg.parse().map_err(|e| wrong(format!("{leg}: {e}")))?;
        match &spec.source {
            Source::Other { scheme, .. } if scheme == MIRROR => {
                Err(wrong("a leg cannot be a mirror itself".to_owned()))
            }
            _ => Ok(spec),
        }
    });
    let legs = legs.collect::<Result<Vec<_>, _>>()?;
    match legs.len() {
        1..=LEGS_MAX => Ok(legs),
        n => Err(wrong(format!("it has {n} legs"))),
    }
}

/// The legs as they are written behind the scheme.
pub(crate) fn write(legs: &[OriginSpec]) -> String {
    let leg = |spec: &OriginSpec| spec.to_string().replace('%', "%25").replace('|', "%7C");
    legs.iter().map(leg).collect::<Vec<_>>().join("|")
}

/// The origin that is a mirror of these.
pub fn mirror(legs: &[OriginSpec]) -> String {
    format!("{MIRROR}:{}", write(legs))
}

/// The legs of a mirror; `None` if it is none.
pub fn legs(spec: &OriginSpec) -> Option<Vec<OriginSpec>> {
    match &spec.source {
        Source::Other { scheme, rest } if scheme == MIRROR => read(rest).ok(),
        _ => None,
    }
}

/// The legs of a mirror, or the origin itself.
pub fn parts(spec: &OriginSpec) -> Vec<OriginSpec> {
    legs(spec).unwrap_or_else(|| vec![spec.clone()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legs_read_and_write() {
        let names = [
            "/a|b",
            "/100%25",
            "nbd://h/x%7Cy",
            "model-hdd:/d",
            "file:mirror:x",
        ];
        let legs: Vec<OriginSpec> = names.iter().map(|n| n.parse().unwrap()).collect();
        let spec: OriginSpec = mirror(&legs).parse().unwrap();
        assert_eq!(super::legs(&spec), Some(legs.clone()));
        assert_eq!(spec.to_string().parse::<OriginSpec>().unwrap(), spec);
        assert_eq!(parts(&legs[0]), legs[..1]);
        for wrong in ["", "/a||/b", "/a|mirror:/b", &["/a"; 9].join("|")] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_mirror_is_checked_leg_by_leg() {
        let check = |text: &str| crate::check(&text.parse().unwrap());
        check("mirror:/a|/b").unwrap();
        check("mirror:/a|b").unwrap_err();
        check("mirror:/a|what:b").unwrap_err();
    }
}
