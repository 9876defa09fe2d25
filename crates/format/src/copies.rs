//! Which of two copies of a structure counts. Superblock and registry stand on flash twice, so that a torn or
//! rotten copy never is the only one.

use crate::error::FormatError;

/// The number of the copy that counts: of two good ones the one of the larger `generation`. An intact copy
/// that a newer version wrote is an error even beside a good one, for the older may lack what it says. If neither
/// is good, the one whose error says more.
pub(crate) fn newest<T>(
    copies: &[Result<T, FormatError>; 2],
    generation: impl Fn(&T) -> u64,
) -> Result<usize, FormatError> {
    for copy in copies {
        if let Err(FormatError::Newer { what, feature }) = copy {
            return Err(FormatError::Newer {
                what,
                feature: feature.clone(),
            });
        }
    }
    Ok(match copies {
        [Ok(a), Ok(b)] => usize::from(generation(b) > generation(a)),
        [Ok(_), Err(_)] => 0,
        [Err(_), Ok(_)] => 1,
        [Err(a), Err(_)] => usize::from(a.is_absent()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn newest_of(copies: [Result<u64, FormatError>; 2]) -> Result<usize, FormatError> {
        newest(&copies, |generation| *generation)
    }

    fn rotten() -> Result<u64, FormatError> {
        Err(FormatError::unfit("a copy", "it is rotten"))
    }

    #[test]
    fn the_larger_generation_counts_and_a_good_copy_before_a_bad_one() {
        assert_eq!(newest_of([Ok(3), Ok(4)]).unwrap(), 1);
        assert_eq!(newest_of([Ok(4), Ok(3)]).unwrap(), 0);
        assert_eq!(newest_of([Ok(4), Ok(4)]).unwrap(), 0);
        assert_eq!(newest_of([rotten(), Ok(1)]).unwrap(), 1);
        assert_eq!(newest_of([Ok(1), rotten()]).unwrap(), 0);
    }

    #[test]
    fn a_newer_version_is_told_and_of_two_errors_the_one_that_says_more() {
        let newer = || {
            Err(FormatError::Newer {
                what: "a copy",
                feature: "x".to_owned(),
            })
        };
        assert!(newest_of([Ok(9), newer()]).is_err());
        assert!(newest_of([newer(), Ok(9)]).is_err());
        assert_eq!(
            newest_of([Err(FormatError::NotAPool), rotten()]).unwrap(),
            1
        );
        assert_eq!(
            newest_of([rotten(), Err(FormatError::NotAPool)]).unwrap(),
            0
        );
    }
}
