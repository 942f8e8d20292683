#!/usr/bin/env bash
# Holds HIP code objects to what they may use, by the notes in them.
#
#   gate.sh TOOLS ARCH CODE...         TOOLS: the folder of llvm-readelf
#
# Every kernel: no scratch memory, and no spilled vector register but a few of wide heads' kernels,
# which go to accumulation registers. Spilled scalar registers go to lanes of vector registers, not
# to memory; they and all vector registers and static shared memory (LDS) have ceilings, a little
# above what the kernels use with clang 15, 17 or 19. Prints a row a kernel;
# exit 1 names what is too much.
set -euo pipefail
tools=$1 arch=$2
shift 2

ceilings() { # KERNEL: vector registers, spilled scalar registers, bytes of LDS [spilled vector registers]
  case $1 in
  # spilled scalars: those over quantised K and V have most, for FP4
  *attend_matrix*Li64E*) echo "208 120 256" ;;
  *attend_matrix*Li128E*) echo "320 120 256" ;;
  *attend_matrix*) echo "448 128 256 4" ;;
  *shared_tiles*) echo "104 104 25600" ;; # of the bench's ladder only
  *one_row*) echo "80 24 2048" ;;
  # the vector kernel, of wide heads and latents, too; with stripes, with trees
  *vector_formILi32ELi[23]E*item_kindE1E*) echo "288 464 0 8" ;;
  *vector_formILi32ELi[23]E*item_kindE2E*) echo "288 104 0 8" ;;
  *vector_formILi32ELi[23]E*) echo "288 64 0 8" ;;
  *vector_form*item_kindE1E*) echo "176 528 0" ;;
  *vector_form*item_kindE2E*) echo "176 96 0" ;;
  *attend*) echo "168 48 0" ;;
  *summed_boundsILi32ELi3E*) echo "256 192 0" ;; # head dims above 256
  *summed_bounds*) echo "112 48 0" ;; # the loads of several blocks are in flight together
  *multiplied_bounds*) echo "96 0 0" ;; # likewise, of four chunks
  *make_extremes*) echo "112 0 0" ;; # likewise, of a block's tokens
  *prep*) echo "112 16 0" ;; # what quantises new rows is in it
  *project_f32*gpu_heads*) echo "104 0 0" ;;
  *project*gpu_heads*) echo "144 0 0" ;; # a step's copies, and what is read transposed, are in flight
  *project_f32*) echo "88 0 0" ;;
  *add_up*) echo "88 0 192" ;; # a KiB's loads are in flight together; the secret
  *merge_parts*) echo "104 0 0" ;; # the loads of eight parts are in flight together
  *) echo "80 0 0" ;;
  esac
}

bad=0 n_kernels=0
for code in "$@"; do
  # the notes: one list element a kernel, which begins with .agpr_count or .args
  kernels=$("$tools/llvm-readelf" --notes "$code" | awk '
    /^  - \.a/ { if (name != "") print name, v, a, sv, ss, lds, priv; name = "" }
    $1 == "-" { sub(/^ *- /, "") }
    $1 == ".agpr_count:" { a = $2 } $1 == ".vgpr_count:" { v = $2 }
    $1 == ".vgpr_spill_count:" { sv = $2 } $1 == ".sgpr_spill_count:" { ss = $2 }
    $1 == ".group_segment_fixed_size:" { lds = $2 } $1 == ".private_segment_fixed_size:" { priv = $2 }
    $1 == ".symbol:" { name = $2 }
    END { if (name != "") print name, v, a, sv, ss, lds, priv }')
  while read -r name vgprs agprs spilled_vectors spilled_scalars lds scratch; do
    [ -n "$name" ] || continue
    n_kernels=$((n_kernels + 1))
    read -r max_vgprs max_scalars max_lds max_vectors < <(ceilings "$name")
    printf '%s %s: %d vector registers (%d accumulation), %d + %d spilled, %d LDS, %d scratch\n' \
      "$arch" "$name" "$vgprs" "$agprs" "$spilled_vectors" "$spilled_scalars" "$lds" "$scratch"
    complain() { echo "TOO MUCH: $name: $*" && bad=1; }
    [ "$spilled_vectors" -le "${max_vectors:-0}" ] || complain "$spilled_vectors vector registers are spilled"
    [ "$scratch" -eq 0 ] || complain "$scratch bytes of scratch memory a thread"
    [ "$vgprs" -le "$max_vgprs" ] || complain "$vgprs vector registers, $max_vgprs are allowed"
    [ "$spilled_scalars" -le "$max_scalars" ] ||
      complain "$spilled_scalars scalar registers are spilled, $max_scalars are allowed"
    [ "$lds" -le "$max_lds" ] || complain "$lds bytes of LDS, $max_lds are allowed"
  done <<<"$kernels"
done
if [ "$n_kernels" -eq 0 ]; then
  echo "no kernel for $arch in $*"
  exit 1
fi
exit $bad
